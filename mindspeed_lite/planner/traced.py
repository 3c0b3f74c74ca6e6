"""Splits the trace of a shortened training into pieces: layers, embedding, final norm, output layer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .layer_work import PartWork, Traffic
from .parameters import Parameters
from .pieces import MemoryEntry
from .work import Collective, CollectiveCall, Group, Product, Scores, Vector

Pass = Literal["forward", "recompute", "backward"]


@dataclass(frozen=True)
class TracedOperation:
    """One launch on the device.

    module: path in the model, "" outside. name: of torch's operator or the kernel's module. work: what it computes,
    None if memory bounds it. bytes: read and written.
    """

    module: str
    during: Pass
    name: str
    work: Product | Scores | None
    flops: float
    bytes: int


@dataclass(frozen=True)
class TracedMessage:
    """bytes: that this rank sends, or receives. ranks: of the group, or of the send."""

    module: str
    during: Pass
    kind: str
    bytes: int
    ranks: tuple[int, ...]
    is_async: bool
    width: int


@dataclass(frozen=True)
class KeptStorage:
    """A storage that a micro-batch keeps for backward. is_shared: by all micro-batches."""

    module: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    is_shared: bool


@dataclass(frozen=True)
class LayerTrace:
    """A micro-batch of a shortened training on rank 0.

    Attributes:
        saved: after its forward.
        peaks: most bytes saved during the backward of a module.
        parameters: elements by name; experts: names of those reduced over expert-data-parallel ranks.
        groups: ranks by Megatron's name.
    """

    operations: Sequence[TracedOperation]
    messages: Sequence[TracedMessage]
    saved: Sequence[KeptStorage]
    peaks: Mapping[str, int]
    parameters: Mapping[str, int]
    experts: frozenset[str]
    groups: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class ModelPiece:
    """What a part of the model takes.

    Attributes:
        work, again: of a micro-batch, and of what its backward recomputes.
        kept: after the forward of a micro-batch. shared: by all micro-batches.
        restored: bytes that its backward holds in addition, at most.
    """

    work: PartWork
    again: PartWork
    parameters: Parameters
    kept: Counter[MemoryEntry]
    shared: Counter[MemoryEntry]
    restored: int

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.kept.elements())

    def __add__(self, other: ModelPiece) -> ModelPiece:
        return ModelPiece(
            self.work + other.work, self.again + other.again, self.parameters + other.parameters,
            self.kept + other.kept, self.shared + other.shared, max(self.restored, other.restored),
        )  # fmt: skip

    def __sub__(self, other: ModelPiece) -> ModelPiece:
        """What this has and `other` has not."""
        mine, other_parameters = self.parameters, other.parameters
        return ModelPiece(
            _less(self.work, other.work),
            _less(self.again, other.again),
            Parameters(mine.dense - other_parameters.dense, mine.experts - other_parameters.experts),
            self.kept - other.kept,
            self.shared - other.shared,
            self.restored,
        )


def _less(work: PartWork, other: PartWork) -> PartWork:
    return PartWork(
        tuple((Counter(work.products) - Counter(other.products)).elements()),
        tuple((Counter(work.scores) - Counter(other.scores)).elements()),
        tuple((Counter(work.vectors) - Counter(other.vectors)).elements()),
        tuple((Counter(work.traffic) - Counter(other.traffic)).elements()),
        work.layers - other.layers,
    )


NOTHING = ModelPiece(PartWork(), PartWork(), Parameters(0), Counter(), Counter(), 0)
# Parts of the model in the order of the forward; layers are numbers.
Part = int | Literal["embedding", "norm", "further", "output"]


def part_of(module: str) -> Part:
    if module.startswith("mtp"):
        return "further"
    if found := re.search(r"\blayers\.(\d+)", module):
        return int(found[1])
    if module.startswith("embedding") or "rotary" in module:
        return "embedding"
    return "norm" if module.startswith("decoder") or module.endswith("norm") else "output"


def split(trace: LayerTrace, number: int, width: int) -> dict[Part, ModelPiece]:
    """Pieces by part of a training with `number` layers and `width` bytes per element."""
    order: list[Part] = ["embedding", *range(number), "norm", "further", "output"]
    saved: dict[Part, list[KeptStorage]] = {each: [] for each in order}
    for entry in trace.saved:
        saved[part_of(entry.module)].append(entry)
    peaks: dict[Part, int] = {}
    for module, size in trace.peaks.items():
        peaks[part_of(module)] = max(size, peaks.get(part_of(module), 0))
    found: dict[Part, ModelPiece] = {}
    below = 0
    for part in order:
        below += sum(each.bytes for each in saved[part])
        parameters = {name for name in trace.parameters if part_of(_module(name)) == part}
        work, again = (_work(trace, part, passes, width) for passes in (("forward", "backward"), ("recompute",)))
        found[part] = ModelPiece(
            work,
            replace(again, products=again.products + _repeated(trace, part)),
            Parameters(
                sum(trace.parameters[name] for name in parameters - trace.experts),
                sum(trace.parameters[name] for name in parameters & trace.experts),
            ),
            Counter(_entry(part, each) for each in saved[part] if not each.is_shared),
            Counter(_entry(part, each) for each in saved[part] if each.is_shared),
            max(0, peaks.get(part, 0) - below),
        )
    return found


def _module(name: str) -> str:
    """Module of a parameter, without wrappers."""
    return ".".join(word for word in name.split(".")[:-1] if word != "module")


def _entry(part: Part, saved: KeptStorage) -> MemoryEntry:
    path = re.sub(r"^.*?layers\.\d+\.?", "", saved.module)
    half = "attention" if "attention" in path or path.startswith("input_layernorm") else "mlp"
    what = f"{path} {saved.dtype} {[*saved.shape]}".strip()
    return MemoryEntry(half if isinstance(part, int) else part, what, saved.bytes)


def _work(trace: LayerTrace, part: Part, passes: tuple[Pass, ...], width: int) -> PartWork:
    messages = [each for each in trace.messages if each.during in passes and part_of(each.module) == part]
    products: list[Product] = []
    scores: list[Scores] = []
    vectors: list[Vector] = []
    halves: list[Product] = []
    for each in trace.operations:
        if each.during not in passes or part_of(each.module) != part:
            continue
        is_scores = "core_attention" in each.module and not isinstance(each.work, Scores)
        if each.during == "backward" and each.work is not None:
            # Priced from the forward's.
            continue
        if isinstance(each.work, Scores):
            scores.append(each.work)
        elif is_scores and each.work is not None:
            halves.append(each.work)
        elif each.work is not None:
            products.append(each.work)
        elif not (is_scores and halves):
            vectors.append(Vector("backward bytes" if each.during == "backward" else "bytes", each.bytes / width))
    # Queries times keys, then probabilities times values; their softmax has the scores' price.
    for first, second in zip(halves[::2], halves[1::2], strict=False):
        heads = first.experts
        scores.append(Scores(1, first.rows / heads, first.columns, heads, first.inner, second.columns, 1.0, False))
    traffic = tuple(found for message in messages if (found := _traffic(trace, message)) is not None)
    return PartWork(tuple(products), tuple(scores), tuple(vectors), traffic, int(isinstance(part, int)))


def _repeated(trace: LayerTrace, part: Part) -> tuple[Product, ...]:
    """Products that a backward repeats by itself: those beyond two for each of the forward."""
    of_part = [each for each in trace.operations if isinstance(each.work, Product) and part_of(each.module) == part]
    forward = {each.flops: each.work for each in of_part if each.during == "forward"}
    counts = Counter(each.flops for each in of_part if each.during == "backward")
    counts.subtract(each.flops for each in of_part if each.during != "backward" for _ in range(2))
    return tuple(work for flops, work in forward.items() for _ in range(counts[flops]))  # type: ignore[misc]


# Collective by the beginning of its function's name.
_KINDS: Mapping[str, Collective] = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "_all_gather": "all_gather", "all_to_all": "all_to_all",
    "reduce_scatter": "reduce_scatter", "_reduce_scatter": "reduce_scatter", "send": "send", "isend": "send",
}  # fmt: skip


def _traffic(trace: LayerTrace, message: TracedMessage) -> Traffic | None:
    """None for receives, and what has no price."""
    kind = next((kind for begin, kind in _KINDS.items() if message.kind.startswith(begin)), None)
    ranks = message.ranks
    if kind is None:
        return None
    size = len(ranks) if kind in ("all_gather", "reduce_scatter") else 1
    group = Group(len(ranks), ranks[1] - ranks[0])
    call = CollectiveCall(kind, float(message.bytes * size), group, message.width)
    category = _category(trace, message)
    beside: Literal["", "products", "attention"] = ""
    if message.is_async:
        beside = "attention" if kind == "send" else "products"
    is_backward = message.during == "backward"
    return Traffic(category, call, 0 if is_backward else 1, 1 if is_backward else 0, beside)


_CATEGORIES = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tensor parallel", "CONTEXT_PARALLEL_GROUP": "context parallel",
    "EXPERT_MODEL_PARALLEL_GROUP": "expert parallel", "EXPERT_TENSOR_PARALLEL_GROUP": "tensor parallel",
}  # fmt: skip


def _category(trace: LayerTrace, message: TracedMessage) -> str:
    """By the name of its group; in small worlds several groups are the same ranks."""
    names = [name for name, ranks in trace.groups.items() if ranks == message.ranks and name in _CATEGORIES]
    routes = ".mlp" in message.module and "shared_experts" not in message.module
    names.sort(key=lambda name: ("EXPERT" in name) != routes)
    if names:
        return _CATEGORIES[names[0]]
    return "context parallel" if "attention" in message.module else "expert parallel"
