"""Describes what the steps of a pipeline take: seconds and bytes of each stage, and of a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .steps import BACKWARDS, Entry, Kind, OverlappedPair, Schedule, Step, steps_of


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes; each sequence has a value for every stage of the model, and an empty one stands for zeros.

    Attributes:
        forward, input_grad, weight_grad: seconds of these steps. A full backward takes the sum of the last two.
        recompute: seconds of a recomputation; empty: those of the forward.
        message: seconds of a message between two ranks.
        one_queue: whether the messages of both directions between two ranks go one after the other.
        between: seconds after a step of this kind in which a rank does not compute: the executor, a call that sends.
        pair: seconds of an overlapped pair, as a factor of the sum of its two steps.
        recomputes: whether a backward without a recomputation of its own recomputes its chunk first, as with
            Megatron's full recomputation.
        activation_bytes: what a forward, or a recomputation, keeps for the backward.
        input_bytes: what a forward keeps that a recomputation follows.
        backward_bytes: what a backward takes while it runs, on top of what its forward has kept.
        weight_grad_bytes: what an input gradient leaves for its weight gradients; empty: all that the forward kept.
    """

    forward: Sequence[float]
    input_grad: Sequence[float]
    weight_grad: Sequence[float]
    recompute: Sequence[float] = ()
    message: float = 0.0
    one_queue: bool = False
    between: Mapping[Kind, float] = field(default_factory=dict)
    pair: float = 1.0
    recomputes: bool = False
    activation_bytes: Sequence[float] = ()
    input_bytes: Sequence[float] = ()
    backward_bytes: Sequence[float] = ()
    weight_grad_bytes: Sequence[float] = ()

    def seconds(self, schedule: Schedule, rank: int, entry: Entry) -> float:
        """Return how long a rank computes an entry."""
        total = sum(self._seconds_of_step(schedule, rank, step) for step in steps_of(entry))
        return total * self.pair if isinstance(entry, OverlappedPair) else total

    def seconds_after(self, entry: Entry) -> float:
        """Return how long a rank that has run an entry does not compute, whatever it waits for."""
        return self.between.get(steps_of(entry)[-1].kind, 0.0)

    def _seconds_of_step(self, schedule: Schedule, rank: int, step: Step) -> float:
        stage, kind = schedule.stage(rank, step.chunk), step.kind
        again = (self.recompute or self.forward)[stage]
        if kind is Kind.FORWARD:
            return self.forward[stage]
        if kind is Kind.RECOMPUTE:
            return again
        if kind is Kind.WEIGHT_GRAD:
            return self.weight_grad[stage]
        seconds = self.input_grad[stage] + (self.weight_grad[stage] if kind is Kind.BACKWARD else 0.0)
        is_lazy = self.recomputes and (stage, step.microbatch) not in schedule.recomputed
        return seconds + (again if is_lazy else 0.0)


def uniform(
    stages: int,
    forward: float = 1.0,
    input_grad: float = 1.0,
    weight_grad: float = 1.0,
    message: float = 0.0,
    pair: float = 1.0,
) -> Costs:
    """Return the costs of stages that are all alike."""
    return Costs([forward] * stages, [input_grad] * stages, [weight_grad] * stages, message=message, pair=pair)


@dataclass(frozen=True)
class Held:
    """What a rank holds while it runs an entry; a count for each of its chunks.

    Attributes:
        activations: micro-batches whose activations are held: from forward, or recomputation, to backward.
        inputs: those of which only the chunk's input is held.
        queued: those whose backward has run, and whose weight gradients have not.
        running: the chunk whose backward runs, None where none does.
    """

    activations: tuple[int, ...]
    inputs: tuple[int, ...]
    queued: tuple[int, ...]
    running: int | None = None

    @property
    def live(self) -> int:
        """Chunk activations held, those that weight gradients wait for included."""
        return sum(self.activations) + sum(self.queued)

    def bytes(self, costs: Costs, stages: Sequence[int]) -> float:
        """Return the bytes of this, for a rank that holds these stages."""
        waiting = costs.weight_grad_bytes or costs.activation_bytes
        found = 0.0
        for sizes, counts in (
            (costs.activation_bytes, self.activations),
            (costs.input_bytes, self.inputs),
            (waiting, self.queued),
        ):
            found += sum(sizes[stage] * number for stage, number in zip(stages, counts, strict=True)) if sizes else 0.0
        if self.running is not None and costs.backward_bytes:
            found += costs.backward_bytes[stages[self.running]]
        return found


def held(schedule: Schedule, rank: int) -> list[Held]:
    """Return what a rank holds while it runs each of its entries; the order alone decides it.

    What a step keeps counts from its beginning, and what it frees to its end.
    """
    activations, inputs, queued = ([0] * schedule.num_chunks for _ in range(3))
    found: list[Held] = []
    for entry in schedule.ranks[rank]:
        running = None
        for step in steps_of(entry):
            chunk = step.chunk
            if step.kind is Kind.FORWARD and not schedule.is_forward_only:
                is_recomputed = (schedule.stage(rank, chunk), step.microbatch) in schedule.recomputed
                (inputs if is_recomputed else activations)[chunk] += 1
            elif step.kind is Kind.RECOMPUTE:
                inputs[chunk] -= 1
                activations[chunk] += 1
            elif step.kind in BACKWARDS:
                running = chunk
        found.append(Held(tuple(activations), tuple(inputs), tuple(queued), running))
        for step in steps_of(entry):
            if step.kind in BACKWARDS:
                activations[step.chunk] -= 1
                queued[step.chunk] += step.kind is Kind.INPUT_GRAD
            elif step.kind is Kind.WEIGHT_GRAD:
                queued[step.chunk] -= 1
    return found


def peak_live(schedule: Schedule, rank: int) -> int:
    """Return the most chunk activations that a rank holds at once."""
    return max((each.live for each in held(schedule, rank)), default=0)


def peak_bytes(schedule: Schedule, rank: int, costs: Costs) -> float:
    """Return the most bytes of activations that a rank holds at once."""
    return max((each.bytes(costs, schedule.placement[rank]) for each in held(schedule, rank)), default=0.0)


def from_measured(
    seconds: Mapping[tuple[Kind, int], float],
    stages: int,
    message: float = 0.0,
    between: Mapping[Kind, float] | None = None,
) -> Costs:
    """Return the costs of measured seconds of a step, by kind and stage, as `trace.median_seconds` gives them.

    A backward that was measured as a whole is taken for half input gradient and half weight gradients.
    """

    def of(kind: Kind, stage: int) -> float:
        return seconds.get((kind, stage), 0.0)

    half = [of(Kind.BACKWARD, stage) / 2 for stage in range(stages)]
    return Costs(
        forward=[of(Kind.FORWARD, stage) for stage in range(stages)],
        input_grad=[of(Kind.INPUT_GRAD, stage) or half[stage] for stage in range(stages)],
        weight_grad=[of(Kind.WEIGHT_GRAD, stage) or half[stage] for stage in range(stages)],
        recompute=[of(Kind.RECOMPUTE, stage) for stage in range(stages)],
        message=message,
        between=between or {},
    )
