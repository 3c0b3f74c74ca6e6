"""Finds an order with separate weight gradients for given costs and memory.

List scheduler with the heuristic of "Zero Bubble Pipeline Parallelism" (Qi et al. 2023, arXiv 2401.10241, section 3.1):
weight gradients fill gaps and free memory. Keeps the shortest of a few settings.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product

from . import orders, steps
from .costs import Costs, peak_live
from .orders import OrderError, PipelineShape
from .simulate import simulate
from .steps import Kind, Placement, Schedule, Step

# Per rank, to try settings.
_TRIED_ROUNDS = 6


def automatic(
    shape: PipelineShape, costs: Costs, max_live: int | None = None, placement: Placement | None = None
) -> Schedule:
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

    def run(settings: _Settings, shape: PipelineShape = shape) -> Schedule:
        return Schedule("zb-auto", shape.microbatches, placement, _Run(shape, costs, placement, settings).run())

    def seconds(schedule: Schedule) -> float:
        return simulate(schedule, costs).makespan

    def shortest(settings: Iterable[_Settings]) -> _Settings:
        return min(settings, key=lambda each: seconds(run(each, tried)))

    every = product((0.0, 0.5, 1.0), (0.0, 0.5, 1.0), (True, False))
    chosen = shortest(_Settings(bound, *each) for each in every)
    # More memory does not always help a heuristic.
    bounds = sorted({max(bound * share // 8, shape.chunks) for share in (4, 5, 6, 7, 8)}, reverse=True)
    found = [run(shortest(replace(chosen, bound=each) for each in bounds))]
    if shape.chunks == 1:
        zb_h1 = orders.from_function("zb-auto", orders.zb_h1, shape)
        if max(peak_live(zb_h1, rank) for rank in range(shape.ranks)) <= bound:
            found.append(zb_h1)
    return min(found, key=seconds)


@dataclass(frozen=True)
class _Settings:
    """Setting of the heuristic.

    bound: maximum chunk activations of a rank.
    taper: fewer warm-up forwards per later rank; 1 as in 1F1B, 0 as many as memory allows.
    patience: share of a weight gradient's time by which it may delay a step whose input arrives meanwhile.
    alternates: prefer a forward after a backward; else always backwards.
    """

    bound: int
    taper: float
    patience: float
    alternates: bool


@dataclass
class _Rank:
    entries: list[Step]
    next_forward: list[int]
    next_backward: list[int]
    # Step -> arrival of its input.
    there: dict[Step, float]
    queued: deque[Step]
    live: int = 0
    free_at: float = 0.0
    last: Kind = Kind.BACKWARD


class _Run:
    def __init__(self, shape: PipelineShape, costs: Costs, placement: Placement, settings: _Settings) -> None:
        self._shape, self._costs, self._placement, self._settings = shape, costs, placement, settings
        self._locations = {
            stage: (rank, chunk) for rank, row in enumerate(placement) for chunk, stage in enumerate(row)
        }
        self._ranks = [_Rank([], [0] * shape.chunks, [0] * shape.chunks, {}, deque()) for _ in range(shape.ranks)]
        rank, chunk = self._locations[0]
        for microbatch in range(shape.microbatches):
            self._ranks[rank].there[steps.forward(chunk, microbatch)] = 0.0
        self._events = [(0.0, rank) for rank in range(shape.ranks)]

    def run(self) -> tuple[tuple[Step, ...], ...]:
        while self._events:
            now, number = heapq.heappop(self._events)
            rank = self._ranks[number]
            if rank.free_at > now:
                continue
            chosen = self._choose(number, now)
            if chosen is not None:
                self._execute(number, chosen, now)
        return tuple(tuple(rank.entries) for rank in self._ranks)

    def _choose(self, number: int, now: float) -> Step | None:
        rank = self._ranks[number]
        next_backwards = self._next(Kind.INPUT_GRAD, rank.next_backward)
        next_forwards = self._next(Kind.FORWARD, rank.next_forward)
        backwards = [step for step in next_backwards if rank.there.get(step, math.inf) <= now]
        waiting = [step for step in next_forwards if rank.there.get(step, math.inf) <= now]
        forwards = [step for step in waiting if self._has_room(number, step)]
        prefers_forward = self._settings.alternates and rank.last is not Kind.FORWARD
        for ready in (forwards, backwards) if prefers_forward else (backwards, forwards):
            if ready:
                return ready[0]
        if not rank.queued:
            return None
        weight_grad = rank.queued[0]
        seconds = self._costs.weight_grad[self._placement[number][weight_grad.chunk]]
        # A forward without memory runs only after something is freed.
        hoped_for = [*next_backwards, *(step for step in next_forwards if self._has_room(number, step))]
        coming = [rank.there.get(step, math.inf) for step in hoped_for]
        if waiting or now + seconds <= min(coming, default=math.inf) + self._settings.patience * seconds:
            return weight_grad
        return None

    def _next(self, kind: Kind, counts: list[int]) -> list[Step]:
        """The last chunk first: ends a micro-batch soonest."""
        return [
            Step(kind, chunk, counts[chunk])
            for chunk in sorted(range(self._shape.chunks), reverse=True)
            if counts[chunk] < self._shape.microbatches
        ]

    def _has_room(self, number: int, step: Step) -> bool:
        rank, shape, settings = self._ranks[number], self._shape, self._settings
        # Memory for later chunks, so that the oldest micro-batch can continue.
        kept_free = shape.chunks - 1 - step.chunk
        ahead = sum(rank.next_forward) - sum(rank.next_backward)
        limit = max(round(settings.bound * (1 - settings.taper * number / shape.ranks)), shape.chunks)
        return rank.live + kept_free < settings.bound and ahead + kept_free < limit

    def _execute(self, number: int, step: Step, now: float) -> None:
        rank, costs = self._ranks[number], self._costs
        stage = self._placement[number][step.chunk]
        rank.entries.append(step)
        if step.kind is Kind.WEIGHT_GRAD:
            rank.queued.popleft()
            rank.live -= 1
            rank.free_at = now + costs.weight_grad[stage]
        elif step.kind is Kind.FORWARD:
            rank.next_forward[step.chunk] += 1
            rank.live += 1
            rank.last = Kind.FORWARD
            rank.free_at = now + costs.forward[stage]
            if stage + 1 in self._locations:
                self._hand_over(number, stage + 1, Kind.FORWARD, step.microbatch, rank.free_at)
            else:
                rank.there[steps.input_grad(step.chunk, step.microbatch)] = rank.free_at
        else:
            rank.next_backward[step.chunk] += 1
            rank.last = Kind.BACKWARD
            rank.queued.append(steps.weight_grad(step.chunk, step.microbatch))
            rank.free_at = now + costs.input_grad[stage]
            if stage > 0:
                self._hand_over(number, stage - 1, Kind.INPUT_GRAD, step.microbatch, rank.free_at)
        heapq.heappush(self._events, (rank.free_at, number))

    def _hand_over(self, source: int, stage: int, kind: Kind, microbatch: int, sent: float) -> None:
        target, chunk = self._locations[stage]
        there = sent + (self._costs.message if target != source else 0.0)
        self._ranks[target].there[Step(kind, chunk, microbatch)] = there
        heapq.heappush(self._events, (there, target))
