"""Pipeline schedules as data: what each rank computes in a training step, in which order.

A schedule holds one tuple of entries per rank. An entry is a `Step` or an `OverlappedPair`. Everything else is derived.

- `Placement`: `placement[rank][chunk]` is the stage of a model chunk. Stage 0 holds the first layers of the model.
- Data dependencies: `Schedule.predecessors(rank, step)`. A step runs after these, and after the entry before it.
- Messages: `input_message` and `output_message` of a step. No step sends or receives. A forward of stage s needs the
  activation of the forward of stage s-1. A backward of stage s needs the gradient of the backward of stage s+1. If the
  two stages are on different ranks, one message goes from one to the other, else the tensor is handed over on the rank.
  With the V placement, rank r sends rank r+1 both activations and gradients. `program` derives the calls that carry
  messages, in one order on both sides.

An executor that records what it ran writes a JSON object per line: `rank`, `kind` (the value of `Kind`), `chunk`,
`microbatch`, and `begin` and `end` in seconds of one clock. The two steps of an overlapped pair are two lines.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

Placement = tuple[tuple[int, ...], ...]


class Kind(str, enum.Enum):
    """What a step computes for one model chunk and one micro-batch."""

    FORWARD = "F"
    # Both gradients.
    BACKWARD = "B"
    # The gradient of the chunk's input. What the weight gradients need is queued.
    INPUT_GRAD = "BI"
    # The weight gradients that one INPUT_GRAD of the same chunk and micro-batch has queued.
    WEIGHT_GRAD = "W"
    # The forward pass once more, from the chunk's input. Its FORWARD then keeps no other activations.
    RECOMPUTE = "R"

    __str__ = str.__str__
    __hash__ = str.__hash__


# The kinds that send a gradient to the stage before.
BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRAD)


class Step(NamedTuple):
    """One computation of a rank; `chunk` counts the rank's model chunks, `microbatch` those of the training step."""

    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.chunk}:{self.microbatch}"


@dataclass(frozen=True)
class OverlappedPair:
    """A forward and a backward of different micro-batches that run at the same time, each behind the other's messages.

    Both inputs are needed before it begins. The activation is sent before the gradient.
    """

    forward: Step
    backward: Step

    def __post_init__(self) -> None:
        if self.forward.kind is not Kind.FORWARD or self.backward.kind not in BACKWARDS:
            raise ValueError(f"an overlapped pair is a forward and a backward, not {self.forward} and {self.backward}")

    def __str__(self) -> str:
        return f"{self.forward}+{self.backward}"


Entry = Step | OverlappedPair


def forward(chunk: int, microbatch: int) -> Step:
    """Return the forward pass of a chunk for a micro-batch."""
    return Step(Kind.FORWARD, chunk, microbatch)


def backward(chunk: int, microbatch: int) -> Step:
    """Return the backward pass of a chunk for a micro-batch, weight gradients included."""
    return Step(Kind.BACKWARD, chunk, microbatch)


def input_grad(chunk: int, microbatch: int) -> Step:
    """Return the backward pass that queues its weight gradients."""
    return Step(Kind.INPUT_GRAD, chunk, microbatch)


def weight_grad(chunk: int, microbatch: int) -> Step:
    """Return the weight gradients that `input_grad` of the same chunk and micro-batch has queued."""
    return Step(Kind.WEIGHT_GRAD, chunk, microbatch)


def recompute(chunk: int, microbatch: int) -> Step:
    """Return the recomputation of a chunk's activations, which its backward then uses."""
    return Step(Kind.RECOMPUTE, chunk, microbatch)


def steps_of(entry: Entry) -> tuple[Step, ...]:
    """Return the steps of an entry: one, or the forward and the backward of a pair."""
    return (entry.forward, entry.backward) if isinstance(entry, OverlappedPair) else (entry,)


def interleaved_placement(ranks: int, chunks: int = 1) -> Placement:
    """Chunk c of rank r is stage c * ranks + r: Megatron's placement, with and without virtual stages."""
    return tuple(tuple(chunk * ranks + rank for chunk in range(chunks)) for rank in range(ranks))


def v_placement(ranks: int) -> Placement:
    """Rank r holds the stages r and 2 * ranks - 1 - r: the first and the last stage are on rank 0."""
    return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))


class Payload(str, enum.Enum):
    """What a message carries."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"

    __str__ = str.__str__
    __hash__ = str.__hash__


class Message(NamedTuple):
    """A tensor between two stages; `stage` is the stage whose step needs it."""

    source: int
    target: int
    payload: Payload
    stage: int
    microbatch: int

    @property
    def is_local(self) -> bool:
        """Whether it stays on the rank."""
        return self.source == self.target

    def __str__(self) -> str:
        return (
            f"{self.payload.value} of stage {self.stage}, micro-batch {self.microbatch}, {self.source}->{self.target}"
        )


@dataclass(frozen=True)
class Schedule:
    """The entries of every rank, and where the stages of the model are.

    name: the order's name, for people.
    microbatches: how many each stage runs.
    placement: `placement[rank][chunk]` is a stage; the stages are 0 to ranks * chunks - 1, each once.
    ranks: `ranks[rank]` are the entries of a rank in order. It is not checked here: see `check.problems`.
    """

    name: str
    microbatches: int
    placement: Placement
    ranks: tuple[tuple[Entry, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.placement)

    @property
    def num_chunks(self) -> int:
        """How many model chunks each rank holds."""
        return len(self.placement[0])

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks

    def stage(self, rank: int, chunk: int) -> int:
        return self.placement[rank][chunk]

    @cached_property
    def locations(self) -> Mapping[int, tuple[int, int]]:
        """Stage -> (rank, chunk)."""
        return MappingProxyType(
            {stage: (rank, chunk) for rank, row in enumerate(self.placement) for chunk, stage in enumerate(row)}
        )

    def steps(self, rank: int) -> Iterator[Step]:
        """Yield the steps of a rank, those of a pair one after the other."""
        for entry in self.ranks[rank]:
            yield from steps_of(entry)

    def one_by_one(self) -> Schedule:
        """Return the same with the two steps of each pair one after the other, as an executor may run them."""
        return replace(self, ranks=tuple(tuple(self.steps(rank)) for rank in range(self.num_ranks)))

    @cached_property
    def is_forward_only(self) -> bool:
        """Whether no rank runs a backward, as in an evaluation."""
        return all(step.kind is Kind.FORWARD for rank in range(self.num_ranks) for step in self.steps(rank))

    @cached_property
    def has_weight_grads(self) -> bool:
        """Whether weight gradients are steps of their own anywhere."""
        return any(step.kind is Kind.WEIGHT_GRAD for rank in range(self.num_ranks) for step in self.steps(rank))

    @cached_property
    def backward_kinds(self) -> Mapping[tuple[int, int], Kind]:
        """(stage, micro-batch) -> the kind of its backward."""
        return MappingProxyType(
            {
                (self.stage(rank, step.chunk), step.microbatch): step.kind
                for rank in range(self.num_ranks)
                for step in self.steps(rank)
                if step.kind in BACKWARDS
            }
        )

    @cached_property
    def recomputed(self) -> frozenset[tuple[int, int]]:
        """The (stage, micro-batch) whose forward keeps its input alone, because a recomputation follows."""
        return frozenset(
            (self.stage(rank, step.chunk), step.microbatch)
            for rank in range(self.num_ranks)
            for step in self.steps(rank)
            if step.kind is Kind.RECOMPUTE
        )

    def input_source(self, rank: int, step: Step) -> tuple[int, Step] | None:
        """Return the (rank, step) whose output a step takes from the neighbouring stage, None where there is none."""
        stage = self.stage(rank, step.chunk)
        if step.kind is Kind.FORWARD and stage > 0:
            source, chunk = self.locations[stage - 1]
            return source, Step(Kind.FORWARD, chunk, step.microbatch)
        if step.kind in BACKWARDS and stage < self.num_stages - 1:
            source, chunk = self.locations[stage + 1]
            kind = self.backward_kinds.get((stage + 1, step.microbatch), Kind.BACKWARD)
            return source, Step(kind, chunk, step.microbatch)
        return None

    def output_target(self, rank: int, step: Step) -> int | None:
        """Return the rank that holds the stage which takes a step's output, None where no stage does."""
        stage = self.stage(rank, step.chunk)
        if step.kind is Kind.FORWARD and stage < self.num_stages - 1:
            return self.locations[stage + 1][0]
        if step.kind in BACKWARDS and stage > 0:
            return self.locations[stage - 1][0]
        return None

    def predecessors(self, rank: int, step: Step) -> tuple[tuple[int, Step], ...]:
        """Return the (rank, step) whose results a step uses, whether or not they are messages."""
        chunk, microbatch = step.chunk, step.microbatch
        before: list[tuple[int, Step]] = []
        source = self.input_source(rank, step)
        if source is not None:
            before.append(source)
        if step.kind is Kind.RECOMPUTE:
            before.append((rank, Step(Kind.FORWARD, chunk, microbatch)))
        elif step.kind is Kind.WEIGHT_GRAD:
            before.append((rank, Step(Kind.INPUT_GRAD, chunk, microbatch)))
        elif step.kind in BACKWARDS:
            is_recomputed = (self.stage(rank, chunk), microbatch) in self.recomputed
            kept_by = Kind.RECOMPUTE if is_recomputed else Kind.FORWARD
            before.append((rank, Step(kept_by, chunk, microbatch)))
        return tuple(before)


def output_message(schedule: Schedule, rank: int, step: Step) -> Message | None:
    """Return the message that carries a step's output, maybe to the rank itself; None where no stage takes it."""
    target = schedule.output_target(rank, step)
    stage = schedule.stage(rank, step.chunk) + (1 if step.kind is Kind.FORWARD else -1)
    return None if target is None else Message(rank, target, _payload(step), stage, step.microbatch)


def input_message(schedule: Schedule, rank: int, step: Step) -> Message | None:
    """Return the message that a step takes, maybe from the rank itself; None where no stage gives one."""
    source = schedule.input_source(rank, step)
    stage = schedule.stage(rank, step.chunk)
    return None if source is None else Message(source[0], rank, _payload(step), stage, step.microbatch)


def _payload(step: Step) -> Payload:
    return Payload.ACTIVATION if step.kind is Kind.FORWARD else Payload.GRADIENT


def build(name: str, microbatches: int, placement: Placement, ranks: Iterable[Iterable[Entry]]) -> Schedule:
    """Return the schedule whose ranks run what these iterables yield."""
    return Schedule(name, microbatches, placement, tuple(tuple(entries) for entries in ranks))
