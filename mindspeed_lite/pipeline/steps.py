"""Pipeline schedules as data: the ordered entries (`Step` or `OverlappedPair`) of each rank.

Dependencies and messages are derived. A forward of stage s needs the activation of stage s-1, a backward the gradient
of stage s+1; tensors between stages on one rank stay there.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
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
# Stages from a step to the one that needs its output; other kinds send nothing.
_ONWARD = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT_GRAD: -1}


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


# Step constructors: (chunk, micro-batch) -> Step.
forward = partial(Step, Kind.FORWARD)
backward = partial(Step, Kind.BACKWARD)
input_grad = partial(Step, Kind.INPUT_GRAD)
weight_grad = partial(Step, Kind.WEIGHT_GRAD)
recompute = partial(Step, Kind.RECOMPUTE)


def steps_of(entry: Entry) -> tuple[Step, ...]:
    return (entry.forward, entry.backward) if isinstance(entry, OverlappedPair) else (entry,)


def interleaved_placement(ranks: int, chunks: int = 1) -> Placement:
    """Megatron's placement: chunk c of rank r is stage c * ranks + r."""
    return tuple(tuple(chunk * ranks + rank for chunk in range(chunks)) for rank in range(ranks))


def v_placement(ranks: int) -> Placement:
    """Rank r holds the stages r and 2 * ranks - 1 - r."""
    return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))


class Message(NamedTuple):
    """Output of a step on rank `source`: a forward's activation or a backward's input gradient."""

    source: int
    target: int
    step: Step

    @property
    def is_local(self) -> bool:
        return self.source == self.target


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
        """The (stage, micro-batch) pairs whose forward keeps only its input."""
        return self.units[Kind.RECOMPUTE]

    def input(self, rank: int, step: Step) -> Message | None:
        """Message that a step needs, maybe from the rank itself."""
        stage = self.stage(rank, step.chunk) - _ONWARD.get(step.kind, self.num_stages)
        if stage not in self.locations:
            return None
        source, chunk = self.locations[stage]
        kind = Kind.FORWARD
        if step.kind in BACKWARDS:
            is_split = (stage, step.microbatch) in self.units[Kind.INPUT_GRAD]
            kind = Kind.INPUT_GRAD if is_split else Kind.BACKWARD
        return Message(source, rank, Step(kind, chunk, step.microbatch))

    def output(self, rank: int, step: Step) -> Message | None:
        """Message that a step makes, maybe to the rank itself."""
        stage = self.stage(rank, step.chunk) + _ONWARD.get(step.kind, self.num_stages)
        return Message(rank, self.locations[stage][0], step) if stage in self.locations else None

    def predecessors(self, rank: int, step: Step) -> list[Message]:
        """Messages that a step needs, with the rank's own earlier step."""
        received = self.input(rank, step)
        before = [] if received is None else [received]
        kind = {Kind.RECOMPUTE: Kind.FORWARD, Kind.WEIGHT_GRAD: Kind.INPUT_GRAD}.get(step.kind)
        if step.kind in BACKWARDS:
            is_recomputed = (self.stage(rank, step.chunk), step.microbatch) in self.recomputed
            kind = Kind.RECOMPUTE if is_recomputed else Kind.FORWARD
        if kind is not None:
            before.append(Message(rank, rank, step._replace(kind=kind)))
        return before
