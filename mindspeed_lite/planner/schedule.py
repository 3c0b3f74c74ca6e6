"""Counts the micro-batches a pipeline stage keeps at once, from the steps of the schedule that it runs.

Without pipelining one after the other. With it 1F1B: a stage runs as many forward passes ahead as there are stages
behind it, then one backward for each forward pass. Interleaved, with model chunks in turns, more of them; other
schedules as `pipeline.orders` has them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed_lite.pipeline.costs import held
from mindspeed_lite.pipeline.steps import BACKWARDS, Kind, OverlappedPair, Schedule, steps_of

from . import orders
from .training import ArgumentError, TrainingConfig

Pass = tuple[str, int]  # ("forward" or "backward", model chunk)


@dataclass(frozen=True)
class Moment:
    """The start of a backward pass, or of the forward pass of another micro-batch beside it.

    Attributes:
        chunk: whose backward pass it is.
        kept: micro-batches that each chunk keeps, this one included.
        forward: the chunk that another micro-batch runs through meanwhile, which `kept` leaves out.
    """

    chunk: int
    kept: tuple[int, ...]
    forward: int | None = None


def passes(training: TrainingConfig, stage: int) -> Iterator[Pass]:
    """The passes of one training step on a stage, in their order."""
    for step in _schedule(training).steps(stage):
        if step.kind is Kind.FORWARD or step.kind in BACKWARDS:
            yield ("forward" if step.kind is Kind.FORWARD else "backward"), step.chunk


def before_backward(training: TrainingConfig, stage: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """At the start of each backward pass: its chunk, and how many micro-batches each chunk keeps, this one included."""
    for each in _moments(_schedule(training), stage):
        yield each.chunk, each.kept


def moments(training: TrainingConfig, stage: int) -> Iterator[Moment]:
    """The different moments of a stage's backward passes; ArgumentError where weight gradients wait for memory."""
    schedule = _schedule(training)
    if _queues(schedule, stage):
        raise ArgumentError(
            f"--pipeline-schedule {schedule.name}: what its weight gradients wait for is not predicted; "
            "`mindspeed-lite schedule` says how many chunk activations are held"
        )
    yield from _different(schedule, stage)


@functools.lru_cache(maxsize=4096)
def _queues(schedule: Schedule, stage: int) -> bool:
    """Whether weight gradients wait while another pass runs; those that run at once hold nothing for longer."""
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
    # Later micro-batches repeat what these do.
    count = min(count, 4 * max(training.pp, group)) if count % min(group, count) == 0 else count
    return orders.schedule(training, count)
