"""Counts micro-batches a pipeline stage holds, from its schedule."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed_lite.pipeline.costs import held
from mindspeed_lite.pipeline.steps import BACKWARDS, Kind, OverlappedPair, Schedule, steps_of

from . import orders
from .training import ArgumentError, TrainingConfig


@dataclass(frozen=True)
class Moment:
    """Start of a backward, or of the forward that overlaps with it.

    Attributes:
        chunk: of the backward.
        kept: micro-batches held by each chunk, including this one.
        forward: chunk of the overlapping forward, not in `kept`.
    """

    chunk: int
    kept: tuple[int, ...]
    forward: int | None = None


def moments(training: TrainingConfig, stage: int) -> Iterator[Moment]:
    """Distinct moments; ArgumentError if weight gradients wait for memory."""
    schedule = _schedule(training)
    if _queues(schedule, stage):
        raise ArgumentError(
            f"--pipeline-schedule {schedule.name}: what its weight gradients wait for is not predicted; "
            "`mindspeed-lite schedule` says how many chunk activations are held"
        )
    yield from _different(schedule, stage)


@functools.lru_cache(maxsize=4096)
def _queues(schedule: Schedule, stage: int) -> bool:
    """Whether weight gradients outlast another pass."""
    return any(
        sum(now.queued) > 0 and all(step.kind is not Kind.WEIGHT_GRAD for step in steps_of(entry))
        for entry, now in zip(schedule.ranks[stage], held(schedule, stage), strict=True)
    )


@functools.lru_cache(maxsize=4096)
def _different(schedule: Schedule, stage: int) -> tuple[Moment, ...]:
    return tuple(dict.fromkeys(_moments(schedule, stage)))


def _moments(schedule: Schedule, stage: int) -> Iterator[Moment]:
    for entry, now in zip(schedule.ranks[stage], held(schedule, stage), strict=True):
        kept = [one + two for one, two in zip(now.activations, now.queued, strict=True)]
        backward = next((step for step in steps_of(entry) if step.kind in BACKWARDS), None)
        if backward is None:
            continue
        is_beside = isinstance(entry, OverlappedPair) and schedule.name == orders.LAYER_BY_LAYER
        forward = steps_of(entry)[0].chunk if is_beside else None
        if forward is not None:
            kept[forward] -= 1
        yield Moment(backward.chunk, tuple(kept), forward)


def _schedule(training: TrainingConfig) -> Schedule:
    count, group = training.microbatches, training.microbatch_group_size_per_vp_stage or training.pp
    # Later micro-batches repeat the pattern.
    count = min(count, 4 * max(training.pp, group)) if count % min(group, count) == 0 else count
    return orders.schedule(training, count)
