"""Pipeline schedules as data: the ordered entries (`Step` or `OverlappedPair`) of each rank.

Dependencies and messages are derived. A forward of stage s needs the activation of stage s-1, a backward the gradient
of stage s+1; tensors between stages on one rank stay there.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

# placement[rank][chunk] is a stage; stage 0 holds the model's first layers.
Placement = tuple[tuple[int, ...], ...]


class Kind(str, enum.Enum):
    FORWARD = "F"
    BACKWARD = "B"
    # Gradient of the chunk's input; weight gradients are queued.
    INPUT_GRAD = "BI"
    # Weight gradients queued by INPUT_GRAD.
    WEIGHT_GRAD = "W"
    # Recomputes from the chunk's input, all that its FORWARD keeps.
    RECOMPUTE = "R"

    __str__ = str.__str__
    __hash__ = str.__hash__


BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRAD)


class Step(NamedTuple):
    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.chunk}:{self.microbatch}"


@dataclass(frozen=True)
class OverlappedPair:
    """Forward and backward of different micro-batches that overlap with each other's messages.

    It begins when both inputs have arrived, and sends the activation first.
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
    return Step(Kind.FORWARD, chunk, microbatch)


def backward(chunk: int, microbatch: int) -> Step:
    """Backward pass with weight gradients."""
    return Step(Kind.BACKWARD, chunk, microbatch)


def input_grad(chunk: int, microbatch: int) -> Step:
    """Backward pass that queues its weight gradients."""
    return Step(Kind.INPUT_GRAD, chunk, microbatch)


def weight_grad(chunk: int, microbatch: int) -> Step:
    """Weight gradients queued by `input_grad`."""
    return Step(Kind.WEIGHT_GRAD, chunk, microbatch)


def recompute(chunk: int, microbatch: int) -> Step:
    return Step(Kind.RECOMPUTE, chunk, microbatch)


def steps_of(entry: Entry) -> tuple[Step, ...]:
    return (entry.forward, entry.backward) if isinstance(entry, OverlappedPair) else (entry,)


def interleaved_placement(ranks: int, chunks: int = 1) -> Placement:
    """Megatron's placement: chunk c of rank r is stage c * ranks + r."""
    return tuple(tuple(chunk * ranks + rank for chunk in range(chunks)) for rank in range(ranks))


def v_placement(ranks: int) -> Placement:
    """Rank r holds the stages r and 2 * ranks - 1 - r."""
    return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))


class Payload(str, enum.Enum):
    ACTIVATION = "activation"
    GRADIENT = "gradient"

    __str__ = str.__str__
    __hash__ = str.__hash__


class Message(NamedTuple):
    """Tensor sent for a step of `stage`."""

    source: int
    target: int
    payload: Payload
    stage: int
    microbatch: int

    @property
    def is_local(self) -> bool:
        return self.source == self.target

    def __str__(self) -> str:
        return (
            f"{self.payload.value} of stage {self.stage}, micro-batch {self.microbatch}, {self.source}->{self.target}"
        )


@dataclass(frozen=True)
class Schedule:
    """Entries of every rank, and stage placement; see `check.problems`."""

    name: str
    microbatches: int
    placement: Placement
    ranks: tuple[tuple[Entry, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.placement)

    @property
    def num_chunks(self) -> int:
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
        for entry in self.ranks[rank]:
            yield from steps_of(entry)

    def one_by_one(self) -> Schedule:
        """The schedule with pairs in sequence."""
        return replace(self, ranks=tuple(tuple(self.steps(rank)) for rank in range(self.num_ranks)))

    @cached_property
    def units(self) -> Mapping[Kind, frozenset[tuple[int, int]]]:
        """Kind -> (stage, micro-batch)."""
        found: dict[Kind, set[tuple[int, int]]] = {kind: set() for kind in Kind}
        for rank in range(self.num_ranks):
            for step in self.steps(rank):
                found[step.kind].add((self.stage(rank, step.chunk), step.microbatch))
        return MappingProxyType({kind: frozenset(each) for kind, each in found.items()})

    @property
    def is_forward_only(self) -> bool:
        return not any(each for kind, each in self.units.items() if kind is not Kind.FORWARD)

    @property
    def has_weight_grads(self) -> bool:
        return bool(self.units[Kind.WEIGHT_GRAD])

    @property
    def recomputed(self) -> frozenset[tuple[int, int]]:
        """(stage, micro-batch) whose forward keeps only its input."""
        return self.units[Kind.RECOMPUTE]

    def input_source(self, rank: int, step: Step) -> tuple[int, Step] | None:
        stage = self.stage(rank, step.chunk)
        if step.kind is Kind.FORWARD and stage > 0:
            source, chunk = self.locations[stage - 1]
            return source, Step(Kind.FORWARD, chunk, step.microbatch)
        if step.kind in BACKWARDS and stage < self.num_stages - 1:
            source, chunk = self.locations[stage + 1]
            is_split = (stage + 1, step.microbatch) in self.units[Kind.INPUT_GRAD]
            kind = Kind.INPUT_GRAD if is_split else Kind.BACKWARD
            return source, Step(kind, chunk, step.microbatch)
        return None

    def output_target(self, rank: int, step: Step) -> int | None:
        stage = self.stage(rank, step.chunk)
        if step.kind is Kind.FORWARD and stage < self.num_stages - 1:
            return self.locations[stage + 1][0]
        if step.kind in BACKWARDS and stage > 0:
            return self.locations[stage - 1][0]
        return None

    def predecessors(self, rank: int, step: Step) -> tuple[tuple[int, Step], ...]:
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
    """Output message, maybe to the rank itself; None if no stage takes it."""
    target = schedule.output_target(rank, step)
    stage = schedule.stage(rank, step.chunk) + (1 if step.kind is Kind.FORWARD else -1)
    return None if target is None else Message(rank, target, _payload(step), stage, step.microbatch)


def input_message(schedule: Schedule, rank: int, step: Step) -> Message | None:
    """Input message, maybe from the rank itself; None if there is none."""
    source = schedule.input_source(rank, step)
    stage = schedule.stage(rank, step.chunk)
    return None if source is None else Message(source[0], rank, _payload(step), stage, step.microbatch)


def _payload(step: Step) -> Payload:
    return Payload.ACTIVATION if step.kind is Kind.FORWARD else Payload.GRADIENT
