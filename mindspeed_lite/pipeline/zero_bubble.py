"""Finds an order with separate weight gradients within a memory bound, for stages and passes of equal time.

List scheduler with the heuristic of "Zero Bubble Pipeline Parallelism" (Qi et al. 2023, arXiv 2401.10241, section 3.1):
weight gradients fill gaps and free memory. Keeps the shortest of a few settings.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import product

from . import costs, steps
from .orders import OrderError, PipelineShape
from .simulate import simulate
from .steps import Kind, Placement, Schedule, Step

# Micro-batches per rank, to try settings.
_TRIED_ROUNDS = 6


def automatic(shape: PipelineShape, max_live: int | None = None, placement: Placement | None = None) -> Schedule:
    """Shortest schedule found with at most `max_live` chunk activations per rank.

    max_live: ranks times chunks by default, as on 1F1B's first rank.
    placement: interleaved by default. With 2 chunks `v_placement` needs less memory.

    Raises:
        OrderError: `max_live` is too small for any schedule.
    """
    placement = placement or steps.interleaved_placement(shape.ranks, shape.chunks)
    bound = shape.ranks * shape.chunks if max_live is None else max_live
    if bound < shape.chunks:
        raise OrderError(f"zb-auto: a rank holds at least {shape.chunks} chunk activations at once, not {bound}")
    # Later micro-batches repeat the pattern.
    tried = replace(shape, microbatches=min(shape.microbatches, _TRIED_ROUNDS * shape.ranks))

    def seconds(settings: _Settings) -> float:
        schedule = _list_schedule(tried, placement, settings)
        return simulate(schedule, costs.uniform(schedule.num_stages)).makespan

    chosen = min((_Settings(bound, *each) for each in product((0.0, 0.5, 1.0), (True, False))), key=seconds)
    return _list_schedule(shape, placement, chosen)


@dataclass(frozen=True)
class _Settings:
    """Setting of the heuristic.

    bound: maximum chunk activations of a rank.
    taper: fewer warm-up forwards per later rank; 1 as in 1F1B, 0 as many as memory allows.
    alternates: prefer a forward after a backward; else always backwards.
    """

    bound: int
    taper: float
    alternates: bool


@dataclass
class _Rank:
    """Scheduling state of a rank. done: passes by chunk; there: step -> arrival of its input."""

    shape: PipelineShape
    settings: _Settings
    forwards_ahead: int
    done: dict[Kind, list[int]]
    there: dict[Step, int] = field(default_factory=dict)
    queued: deque[Step] = field(default_factory=deque)
    live: int = 0
    entries: list[Step] = field(default_factory=list)
    last: Kind = Kind.BACKWARD

    def choose(self, now: int) -> Step | None:
        forwards = [step for step in self._next(Kind.FORWARD, now) if self._has_room(step)]
        backwards = self._next(Kind.INPUT_GRAD, now)
        prefers_forward = self.settings.alternates and self.last is not Kind.FORWARD
        first = (*forwards, *backwards) if prefers_forward else (*backwards, *forwards)
        return next(iter((*first, *self.queued)), None)

    def _next(self, kind: Kind, now: int) -> list[Step]:
        """Steps whose input has arrived; the last chunk first, which ends a micro-batch soonest."""
        steps = [Step(kind, chunk, done) for chunk, done in reversed([*enumerate(self.done[kind])])]
        return [step for step in steps if self.there.get(step, math.inf) <= now]

    def _has_room(self, step: Step) -> bool:
        # Memory for later chunks, so that the oldest micro-batch can continue.
        kept_free = self.shape.chunks - 1 - step.chunk
        ahead = sum(self.done[Kind.FORWARD]) - sum(self.done[Kind.INPUT_GRAD])
        return self.live + kept_free < self.settings.bound and ahead + kept_free < self.forwards_ahead

    def run(self, step: Step) -> None:
        self.entries.append(step)
        if step.kind is Kind.WEIGHT_GRAD:
            self.queued.popleft()
            self.live -= 1
            return
        self.done[step.kind][step.chunk] += 1
        self.last = step.kind
        if step.kind is Kind.FORWARD:
            self.live += 1
        else:
            self.queued.append(step._replace(kind=Kind.WEIGHT_GRAD))


def _list_schedule(shape: PipelineShape, placement: Placement, settings: _Settings) -> Schedule:
    """List-schedule all passes, each taking one unit of time."""
    empty = Schedule("zb-auto", shape.microbatches, placement, ())
    ranks = []
    for number in range(shape.ranks):
        ahead = max(round(settings.bound * (1 - settings.taper * number / shape.ranks)), shape.chunks)
        done = {kind: [0] * shape.chunks for kind in (Kind.FORWARD, Kind.INPUT_GRAD)}
        ranks.append(_Rank(shape, settings, ahead, done))
    rank, chunk = empty.locations[0]
    ranks[rank].there = {steps.forward(chunk, microbatch): 0 for microbatch in range(shape.microbatches)}
    for now in range(3 * shape.ranks * shape.chunks * shape.microbatches):
        for number, state in enumerate(ranks):
            step = state.choose(now)
            if step is None:
                continue
            state.run(step)
            if step.kind is Kind.WEIGHT_GRAD:
                continue
            stage = placement[number][step.chunk] + (1 if step.kind is Kind.FORWARD else -1)
            if stage == empty.num_stages:
                state.there[step._replace(kind=Kind.INPUT_GRAD)] = now + 1
            elif stage >= 0:
                target, chunk = empty.locations[stage]
                ranks[target].there[Step(step.kind, chunk, step.microbatch)] = now + 1
    return replace(empty, ranks=tuple(tuple(each.entries) for each in ranks))
