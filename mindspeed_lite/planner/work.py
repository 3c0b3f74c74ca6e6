"""Units of work for a cost model: operators by shape, messages by size and group.

`published` and `calibrated` implement `DeviceCosts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

Direction = Literal["forward", "input_grad", "weight_grad"]
# Time categories of a micro-batch, in display order.
CATEGORIES = ("products", "attention", "experts", "vector", "tensor parallel", "context parallel", "expert parallel")


@dataclass(frozen=True)
class Product:
    """[rows, inner] times [inner, columns]; `experts` above 0: rows of that many weights together."""

    rows: float
    inner: int
    columns: int
    experts: int = 0

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inner * self.columns


@dataclass(frozen=True)
class Scores:
    """Causal attention of `rows` queries and `keys` keys, with `heads` heads and `batch` sequences.

    share: computed part of rows times keys. is_flash: scores stay on chip. softmax_width: bytes of one that does not.
    """

    batch: int
    rows: float
    keys: float
    heads: float
    query_size: int
    value_size: int
    share: float
    is_flash: bool
    softmax_width: int = 2

    @property
    def flops(self) -> float:
        pairs = self.batch * self.rows * self.keys * self.heads
        return 2.0 * pairs * (self.query_size + self.value_size) * self.share


@dataclass(frozen=True)
class Vector:
    """Memory-bound operator; `numbers`: output elements."""

    name: str
    numbers: float
    is_fused: bool = False


# Name -> reads and writes per element, (forward, backward), of Megatron's then a fused operator. Derived from
# operands; unfused ones add fp32 intermediates.
PASSES: Mapping[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "norm": ((8.0, 12.0), (2.0, 4.0)),
    "residual": ((4.0, 3.0), (3.0, 2.0)),
    "rope": ((7.0, 7.0), (2.0, 2.0)),
    "activation": ((6.0, 9.0), (3.0, 5.0)),
    "activation, not gated": ((5.0, 8.0), (2.0, 3.0)),
    "loss": ((8.0, 4.0), (2.0, 2.0)),
    "embedding": ((2.0, 4.0), (2.0, 4.0)),
    "permute": ((7.5, 8.5), (4.0, 4.0)),
    "router": ((12.0, 12.0), (4.0, 4.0)),
    "latent": ((4.0, 4.0), (4.0, 4.0)),
    "accumulate": ((0.0, 5.0), (0.0, 0.0)),
}


@dataclass(frozen=True)
class Group:
    """`size` ranks of a collective, `stride` apart; `stages`: of a pipeline, each of which sends to the next."""

    size: int
    stride: int = 1
    stages: int = 0

    def per_node(self, ranks_per_node: int) -> int:
        """Group's ranks on a node."""
        return max(1, min(self.size, ranks_per_node // self.stride))


Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]


@dataclass(frozen=True)
class CollectiveCall:
    """Collective over `bytes`: a gather's output, a scatter's input, or a message.

    width: bytes per element, for CPU reductions. chosen: experts of a row that crosses to a node once for all of them.
    """

    kind: Collective
    bytes: float
    group: Group
    width: int = 2
    chosen: int = 1


class DeviceCosts(Protocol):
    """A device's seconds for each unit of work."""

    @property
    def name(self) -> str: ...

    @property
    def memory(self) -> float:
        """Bytes; 0 if unknown."""
        ...

    @property
    def ranks_per_node(self) -> int: ...

    def product(self, work: Product, direction: Direction, width: int) -> float: ...

    def scores(self, work: Scores, is_backward: bool, width: int) -> float: ...

    def vector(self, work: Vector, is_backward: bool, width: int) -> float: ...

    def message(self, work: CollectiveCall) -> float: ...

    def optimizer(self, parameters: float, is_fused: bool) -> float: ...

    def host_copy(self, size: float) -> float: ...

    def host(self, launches: float) -> float:
        """Host seconds of operators that overlap with the device."""
        ...

    def layer_overhead(self, is_backward: bool) -> float: ...

    def pass_overhead(self, is_backward: bool) -> float: ...

    def step_overhead(self) -> float: ...

    def shared(self, busy: float, makespan: float, ranks: int) -> float:
        """Step seconds with `busy` total seconds, if ranks share cores."""
        ...
