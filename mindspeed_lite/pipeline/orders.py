"""Published pipeline orders as functions of (rank, shape) that yield a rank's entries.

Sources: 1F1B and interleaved as in Megatron-LM (Narayanan et al. 2021, arXiv 2104.04473); ZB-H1 from "Zero Bubble
    Pipeline Parallelism" (Qi et al. 2023, arXiv 2401.10241); DualPipeV from DeepSeek.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from . import steps
from .steps import Entry, OverlappedPair, Placement, Schedule, Step, backward, forward, input_grad, weight_grad


class OrderError(ValueError):
    pass


@dataclass(frozen=True)
class PipelineShape:
    """Sizes of a pipeline.

    group: consecutive micro-batches of a chunk, microbatch_group_size_per_vp_stage; 0 means ranks.
    """

    ranks: int
    microbatches: int
    chunks: int = 1
    group: int = 0

    @property
    def group_size(self) -> int:
        return min(self.group or self.ranks, self.microbatches)


Order = Callable[[int, PipelineShape], Iterator[Entry]]


def table(shape: PipelineShape) -> list[tuple[int, int]]:
    """(chunk, micro-batch) of forwards, in groups of micro-batches."""
    total, size = shape.microbatches, shape.group_size
    return [
        (chunk, microbatch)
        for begin in range(0, total, size)
        for chunk in range(shape.chunks)
        for microbatch in range(begin, min(begin + size, total))
    ]


def one_forward_one_backward(rank: int, shape: PipelineShape) -> Iterator[Entry]:
    """1F1B: one warm-up forward per later rank, then a backward after each forward."""
    forwards, backwards = _passes(shape)
    return _alternate(forwards, backwards, shape.ranks - rank - 1)


def interleaved(rank: int, shape: PipelineShape) -> Iterator[Entry]:
    """Interleaved 1F1B: two more warm-up forwards per later rank."""
    forwards, backwards = _passes(shape)
    return _alternate(forwards, backwards, _interleaved_warmup(rank, shape))


def interleaved_overlap(rank: int, shape: PipelineShape) -> Iterator[Entry]:
    """Interleaved 1F1B in overlapped pairs: Megatron's order for overlapped experts.

    One more warm-up forward keeps a pair's micro-batch and chunk distinct.
    """
    forwards, backwards = _passes(shape)
    ahead = 0 if shape.ranks == 1 else _interleaved_warmup(rank, shape)
    return _alternate(forwards, backwards, ahead + 1, overlap=True)


def zb_h1(rank: int, shape: PipelineShape) -> Iterator[Entry]:
    """ZB-H1: 1F1B with weight gradients delayed by the number of earlier ranks.

    Every rank then keeps as much as 1F1B's first.
    """
    total = shape.microbatches
    ahead = min(shape.ranks - rank - 1, total)
    for microbatch in range(ahead):
        yield forward(0, microbatch)
    for microbatch in range(total):
        if microbatch + ahead < total:
            yield forward(0, microbatch + ahead)
        yield input_grad(0, microbatch)
        if microbatch >= rank:
            yield weight_grad(0, microbatch - rank)
    for microbatch in range(max(0, total - rank), total):
        yield weight_grad(0, microbatch)


def dualpipev(rank: int, shape: PipelineShape, dw_detach: bool = False, is_whole: bool = False) -> Iterator[Entry]:
    """DualPipeV on the V placement: chunk 0 goes down the ranks, chunk 1 up.

    dw_detach: split final backwards; weight gradients fill waits.
    is_whole: split none, for models that cannot defer weight gradients.
    """
    forwards, backwards, queued = (count(), count()), (count(), count()), deque[Step]()
    ranks, behind = shape.ranks, shape.ranks - rank - 1

    def run_forward(chunk: int) -> Step:
        return forward(chunk, next(forwards[chunk]))

    def run_backward(chunk: int, is_split: bool = False) -> Step:
        microbatch = next(backwards[chunk])
        if not is_split:
            return backward(chunk, microbatch)
        queued.append(weight_grad(chunk, microbatch))
        return input_grad(chunk, microbatch)

    for _ in range(2 * behind):
        yield run_forward(0)
    for _ in range(rank + 1):
        yield run_forward(0)
        yield run_forward(1)
    for _ in range(behind):
        yield run_backward(1, is_split=not is_whole)
        if queued:
            yield queued.popleft()
        yield run_forward(1)
    for number in range(shape.microbatches - 2 * ranks + rank + 1):
        there, back = run_forward(0), run_backward(1)
        # On the last rank the forward feeds the next pair: separate steps shorten the bubble.
        yield from (there, back) if number == behind == 0 else (OverlappedPair(there, back),)
        yield OverlappedPair(run_forward(1), run_backward(0))
    for _ in range(behind):
        yield run_backward(1)
        yield OverlappedPair(run_forward(1), run_backward(0))
    half = (rank + 1) // 2
    for number in range(rank + 1):
        yield run_backward(1, dw_detach and (number > half or (number == half and rank % 2 == 1)))
        yield run_backward(0, dw_detach and number >= half)
    for _ in range(behind):
        if dw_detach:
            yield queued.popleft()
        yield run_backward(0, dw_detach)
    yield from queued


def forward_only(rank: int, shape: PipelineShape) -> Iterator[Entry]:
    """Evaluation, in Megatron's order."""
    yield from _passes(shape)[0]


def forward_only_v(rank: int, shape: PipelineShape) -> Iterator[Entry]:
    """Forwards on the V placement: chunks alternate once the first output returns."""
    total, ahead = shape.microbatches, min(shape.ranks - rank, shape.microbatches)
    for microbatch in range(ahead):
        yield forward(0, microbatch)
    for microbatch in range(total):
        yield forward(1, microbatch)
        if microbatch + ahead < total:
            yield forward(0, microbatch + ahead)


def _passes(shape: PipelineShape) -> tuple[list[Step], list[Step]]:
    order = table(shape)
    return [forward(*unit) for unit in order], [backward(shape.chunks - 1 - chunk, batch) for chunk, batch in order]


def _interleaved_warmup(rank: int, shape: PipelineShape) -> int:
    return 2 * (shape.ranks - rank - 1) + (shape.chunks - 1) * shape.group_size


def _alternate(
    forwards: Sequence[Step], backwards: Sequence[Step], ahead: int, overlap: bool = False
) -> Iterator[Entry]:
    ahead = min(ahead, len(forwards))
    yield from forwards[:ahead]
    for there, back in zip(forwards[ahead:], backwards, strict=False):
        yield from (OverlappedPair(there, back),) if overlap else (there, back)
    yield from backwards[len(forwards) - ahead :]


def _why_not_interleaved(shape: PipelineShape) -> str | None:
    """Megatron's conditions: fewer consecutive micro-batches than ranks deadlock."""
    size, rest = shape.group or shape.ranks, shape.microbatches % (shape.group or shape.ranks)
    if shape.ranks == 1:
        return None if shape.chunks == 1 else "one rank has nothing to interleave: use one chunk"
    if shape.chunks < 2:
        return "it needs at least 2 model chunks a rank"
    if not shape.ranks <= size <= shape.microbatches:
        return (
            f"the micro-batches that a chunk runs in a row are {shape.ranks} (ranks) to {shape.microbatches} "
            f"(micro-batches of a step), not {size}"
        )
    if 0 < rest < shape.ranks:
        return f"the last group has {rest} micro-batches: a group has at least as many as there are ranks, or none"
    return None


def _why_not_dualpipev(shape: PipelineShape) -> str | None:
    if shape.ranks < 2:
        return "it needs at least 2 pipeline ranks"
    least = 2 * shape.ranks - 1
    return None if shape.microbatches >= least else f"it needs at least {least} micro-batches, not {shape.microbatches}"


@dataclass(frozen=True)
class NamedOrder:
    """Published order; chunks: per rank, 0 for the shape's."""

    order: Order
    chunks: int = 1
    placement: Callable[[int], Placement] | None = None
    why_not: Callable[[PipelineShape], str | None] = lambda shape: None


_DUALPIPEV = NamedOrder(dualpipev, 2, steps.v_placement, _why_not_dualpipev)
ORDERS = {
    "1f1b": NamedOrder(one_forward_one_backward),
    "interleaved": NamedOrder(interleaved, 0, None, _why_not_interleaved),
    "interleaved-overlap": NamedOrder(interleaved_overlap, 0, None, _why_not_interleaved),
    "zb-h1": NamedOrder(zb_h1),
    "dualpipev": _DUALPIPEV,
    "dualpipev-dw-detach": replace(_DUALPIPEV, order=partial(dualpipev, dw_detach=True)),
    "dualpipev-whole": replace(_DUALPIPEV, order=partial(dualpipev, is_whole=True)),
    "forward-only": NamedOrder(forward_only, 0),
    "forward-only-v": NamedOrder(forward_only_v, 2, steps.v_placement),
}
TRAINING_ORDERS = tuple(name for name in ORDERS if not name.startswith("forward-only"))


def build(name: str, shape: PipelineShape) -> Schedule:
    """Raises OrderError if none exists for this shape."""
    if name not in ORDERS:
        raise OrderError(f"there is no order {name!r}: choose one of {', '.join(ORDERS)}")
    named = ORDERS[name]
    if shape.ranks < 1 or shape.microbatches < 1 or shape.chunks < 1:
        raise OrderError(f"{name}: ranks, micro-batches and chunks are at least 1, not {shape}")
    if named.chunks and shape.chunks != named.chunks:
        raise OrderError(f"{name}: a rank has {named.chunks} model chunk{'s' * (named.chunks > 1)}, not {shape.chunks}")
    reason = named.why_not(shape)
    if reason is not None:
        raise OrderError(f"{name}: {reason}")
    return from_function(name, named.order, shape, named.placement(shape.ranks) if named.placement else None)


def from_function(name: str, order: Order, shape: PipelineShape, placement: Placement | None = None) -> Schedule:
    """Unchecked; placement: interleaved by default."""
    placement = placement or steps.interleaved_placement(shape.ranks, shape.chunks)
    ranks = tuple(tuple(order(rank, shape)) for rank in range(shape.ranks))
    return Schedule(name, shape.microbatches, placement, ranks)
