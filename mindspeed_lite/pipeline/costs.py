"""Seconds and bytes of pipeline steps and messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .steps import BACKWARDS, Entry, Kind, OverlappedPair, Schedule, Step, steps_of


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes per stage; an empty sequence means zeros.

    input_grad, weight_grad: a full backward is their sum.
    recompute: empty: as forward.
    message: seconds between two ranks.
    one_queue: both directions between two ranks share one queue.
    pair: seconds of an overlapped pair over the sum of its steps.
    recomputes: a backward without a RECOMPUTE step recomputes its chunk first, as in Megatron's full recomputation.
    activation_bytes: kept from forward or recomputation to the weight gradients.
    input_bytes: kept by the forward of a recomputed chunk.
    backward_bytes: additional during a backward.
    """

    forward: Sequence[float]
    input_grad: Sequence[float]
    weight_grad: Sequence[float]
    recompute: Sequence[float] = ()
    message: float = 0.0
    one_queue: bool = False
    pair: float = 1.0
    recomputes: bool = False
    activation_bytes: Sequence[float] = ()
    input_bytes: Sequence[float] = ()
    backward_bytes: Sequence[float] = ()

    def seconds(self, schedule: Schedule, rank: int, entry: Entry) -> float:
        total = sum(self._seconds_of_step(schedule, rank, step) for step in steps_of(entry))
        return total * self.pair if isinstance(entry, OverlappedPair) else total

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
    stages: int, forward: float = 1.0, input_grad: float = 1.0, weight_grad: float = 1.0, message: float = 0.0
) -> Costs:
    return Costs([forward] * stages, [input_grad] * stages, [weight_grad] * stages, message=message)


@dataclass(frozen=True)
class Held:
    """Number of micro-batches that a rank holds in memory during a step, per model chunk.

    Args:
        activations: all activations, from forward or recomputation to backward.
        inputs: only the chunk's input, before recomputation.
        queued: deferred weight gradients.
        running: chunk of the running backward.
    """

    activations: tuple[int, ...]
    inputs: tuple[int, ...]
    queued: tuple[int, ...]
    running: int | None = None

    @property
    def live(self) -> int:
        """Chunk activations, including queued weight gradients'."""
        return sum(self.activations) + sum(self.queued)

    def bytes(self, costs: Costs, stages: Sequence[int]) -> float:
        found = 0.0
        for sizes, counts in (
            (costs.activation_bytes, self.activations),
            (costs.input_bytes, self.inputs),
            (costs.activation_bytes, self.queued),
        ):
            found += sum(sizes[stage] * number for stage, number in zip(stages, counts, strict=True)) if sizes else 0.0
        if self.running is not None and costs.backward_bytes:
            found += costs.backward_bytes[stages[self.running]]
        return found


def held(schedule: Schedule, rank: int) -> list[Held]:
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
    """Peak chunk activations."""
    return max((each.live for each in held(schedule, rank)), default=0)


def peak_bytes(schedule: Schedule, rank: int, costs: Costs) -> float:
    return max((each.bytes(costs, schedule.placement[rank]) for each in held(schedule, rank)), default=0.0)
