"""The units of work that a cost model prices: operators by shape, and messages by size and group.

A device is anything with the methods of `DeviceCosts`: `published` from published figures, `calibrated`
from measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

Direction = Literal["forward", "input_grad", "weight_grad"]
# Where the seconds of a micro-batch go, in the order in which they are shown.
CATEGORIES = ("products", "attention", "experts", "vector", "tensor parallel", "context parallel", "expert parallel")


@dataclass(frozen=True)
class Product:
    """[rows, inner] times [inner, columns]; `experts` above 0: rows are those of so many weights together."""

    rows: float
    inner: int
    columns: int
    experts: int = 0

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inner * self.columns


@dataclass(frozen=True)
class Scores:
    """Causal attention of `rows` queries to `keys` keys in each of `heads` heads of `batch` sequences.

    share: of rows times keys that is computed. is_flash: whether scores stay on the chip.
    """

    batch: int
    rows: float
    keys: float
    heads: float
    query_size: int
    value_size: int
    share: float
    is_flash: bool

    @property
    def flops(self) -> float:
        pairs = self.batch * self.rows * self.keys * self.heads
        return 2.0 * pairs * (self.query_size + self.value_size) * self.share


@dataclass(frozen=True)
class Vector:
    """An operator that moves bytes: `name` says which, `numbers` how many numbers of its output there are."""

    name: str
    numbers: float
    is_fused: bool = False


# Name -> how often a number is read or written: (forward, backward) of Megatron's own, then of a fused operator. From
# what each operator has to read and write; a plain one also writes and reads what is between its parts, in fp32.
PASSES: Mapping[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "norm": ((8.0, 12.0), (2.0, 4.0)),
    "residual": ((4.0, 3.0), (3.0, 2.0)),
    "rope": ((7.0, 7.0), (2.0, 2.0)),
    "activation": ((6.0, 9.0), (3.0, 5.0)),
    "loss": ((8.0, 4.0), (2.0, 2.0)),
    "embedding": ((2.0, 4.0), (2.0, 4.0)),
    "permute": ((3.0, 3.0), (2.0, 2.0)),
    "router": ((12.0, 12.0), (4.0, 4.0)),
    "latent": ((4.0, 4.0), (4.0, 4.0)),
    "accumulate": ((0.0, 5.0), (0.0, 4.0)),
}


@dataclass(frozen=True)
class Group:
    """The ranks of a collective: `size` of them, each `stride` ranks from the next."""

    size: int
    stride: int = 1

    def per_node(self, ranks_per_node: int) -> int:
        """How many of them share a node."""
        return max(1, min(self.size, ranks_per_node // self.stride))


Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]


@dataclass(frozen=True)
class CollectiveCall:
    """A collective over the whole tensor of `bytes`: what a rank has after a gather, before a scatter, or sends.

    width: bytes of a number, which a reduction depends on where a processor computes it.
    """

    kind: Collective
    bytes: float
    group: Group
    width: int = 2


class DeviceCosts(Protocol):
    """What a cost model asks of a device; seconds for each."""

    @property
    def name(self) -> str: ...

    @property
    def ranks_per_node(self) -> int: ...

    def product(self, work: Product, direction: Direction, width: int) -> float: ...

    def scores(self, work: Scores, is_backward: bool, width: int) -> float: ...

    def vector(self, work: Vector, is_backward: bool, width: int) -> float: ...

    def message(self, work: CollectiveCall) -> float: ...

    def optimizer(self, parameters: float, is_fused: bool) -> float: ...

    def host_copy(self, size: float) -> float: ...

    def layer_overhead(self, is_backward: bool) -> float: ...

    def pass_overhead(self, is_backward: bool) -> float: ...

    def step_overhead(self) -> float: ...

    def shared(self, busy: float, makespan: float, ranks: int) -> float:
        """A step whose ranks are `busy` for so many seconds in all, where some may share a core."""
        ...
