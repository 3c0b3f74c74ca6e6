"""Simulates expert copies and placement on recorded steps. Standard library only.

Policies see an exponential average of earlier loads.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from . import placement as placements
from .placement import SentTokens, hot_experts, loads_with_copies
from .record import LoadHeader, LoadRecord, LoadStep


@dataclass(frozen=True)
class BalancingOptions:
    """Policy settings.

    copies: maximum per micro-batch. interval: steps between two placements.
    decay: weight of the past, below 1. break_even: tokens per step a copy must take off the fullest rank.
    """

    copies: int = 3
    interval: int = 50
    decay: float = 0.9
    break_even: float = 0.0


@dataclass(frozen=True)
class ExpertSizes:
    """Hidden sizes of model and SwiGLU expert."""

    hidden: int
    ffn: int

    @property
    def copy_bytes(self) -> int:
        """bf16 weights to a rank, fp32 gradients to the owner."""
        return 3 * self.hidden * self.ffn * (2 + 4)

    @property
    def move_bytes(self) -> int:
        """bf16 and fp32 weights, and two moments."""
        return 3 * self.hidden * self.ffn * (2 + 3 * 4)

    @property
    def token_bytes(self) -> int:
        """Dispatch and combine, forward and backward, bf16."""
        return 4 * 2 * self.hidden


@dataclass
class PolicyOutcome:
    """Result of one policy over all steps and layers.

    name: "none", "copies", "placement" or "both".
    fullest: tokens of the fullest rank, summed; known: with perfect prediction; even: at equal load.
    by_step: fullest / even of each step.
    copied: copies made. moved: experts that changed rank. stayed: tokens of copied experts that stayed.
    """

    name: str
    fullest: float = 0.0
    known: float = 0.0
    even: float = 0.0
    by_step: list[float] = field(default_factory=list)
    copied: int = 0
    stayed: float = 0.0
    moved: int = 0

    @property
    def imbalance(self) -> float:
        return self.fullest / self.even if self.even else 1.0

    @property
    def known_imbalance(self) -> float:
        return self.known / self.even if self.even else 1.0


def simulate(record: LoadRecord, ranks: int, options: BalancingOptions) -> list[PolicyOutcome]:
    """Run all policies; ranks: of the expert-parallel group. Raises ValueError if they do not divide the experts."""
    experts = record.header.experts
    home = placements.contiguous(experts, ranks)
    outcomes = [PolicyOutcome(name) for name in ("none", "copies", "placement", "both")]
    fullest = {each.name: [0.0] * len(record.steps) for each in outcomes}
    evens = [0.0] * len(record.steps)
    for row in range(len(record.header.layers)):
        placed, average = home, [0.0] * experts
        for at, step in enumerate(record.steps):
            # Each replica has an equal share of tokens.
            loads = [load / record.header.replicas for load in step.experts[row]]
            evens[at] += sum(loads) / ranks
            moves = 0
            if at and at % options.interval == 0:
                after = placements.chosen(average, placed, ranks)
                moves, placed = placements.moved(after, placed), after
            best = placements.greedy(loads, ranks)
            predicted, sent = SentTokens.evenly(average, ranks), SentTokens.evenly(loads, ranks)
            for outcome in outcomes:
                is_placed = outcome.name in ("placement", "both")
                copies = options.copies if outcome.name in ("copies", "both") else 0
                outcome.moved += moves if is_placed else 0
                where, known = (placed, best) if is_placed else (home, home)
                hot = hot_experts(predicted, where, copies, options.break_even)
                outcome.copied += len(hot)
                outcome.stayed += sum(loads[each] for each in hot) * (ranks - 1) / ranks
                fullest[outcome.name][at] += max(loads_with_copies(sent, where, hot))
                hot = hot_experts(sent, known, copies, options.break_even)
                outcome.known += max(loads_with_copies(sent, known, hot))
            # The first step initialises the average.
            weight = options.decay if at else 0.0
            average = [weight * old + (1 - weight) * new for old, new in zip(average, loads, strict=True)]
    for outcome in outcomes:
        outcome.fullest, outcome.even = sum(fullest[outcome.name]), sum(evens)
        outcome.by_step = [a / b if b else 1.0 for a, b in zip(fullest[outcome.name], evens, strict=True)]
    return outcomes


@dataclass(frozen=True)
class GeneratedLoad:
    """Power-law expert popularity with drift.

    skew: initial load of the most popular expert over the mean.
    drift: relative change of popularity per step.
    """

    experts: int = 64
    topk: int = 8
    ranks: int = 8
    layers: int = 4
    steps: int = 200
    tokens: int = 8192
    skew: float = 4.0
    drift: float = 0.02
    seed: int = 1234

    def record(self) -> LoadRecord:
        """Raises ValueError for an unreachable skew, or topk above the number of experts."""
        if self.topk > self.experts:
            raise ValueError(f"topk={self.topk}: a token has at most all {self.experts} experts")
        if not 1 <= self.skew < self.experts:
            raise ValueError(f"skew is the most popular expert's load over the mean, from 1 to {self.experts - 1}")
        header = LoadHeader(self.experts, self.topk, self.ranks, 1, self.layers, tuple(range(1, self.layers + 1)))
        chance = random.Random(self.seed)
        home = placements.contiguous(self.experts, self.ranks)
        layers = [self._layer(chance) for _ in range(self.layers)]
        steps = []
        for number in range(1, self.steps + 1):
            rows = [next(layer) for layer in layers]
            by_rank = [[int(each) for each in placements.rank_loads(row, home, self.ranks)] for row in rows]
            steps.append(LoadStep(number, [self.tokens] * self.layers, rows, by_rank))
        return LoadRecord(header, tuple(steps))

    def _layer(self, chance: random.Random) -> Iterator[list[int]]:
        weights = [(place + 1) ** -_power(self.experts, self.skew) for place in range(self.experts)]
        chance.shuffle(weights)
        while True:
            total = sum(weights)
            # An expert gets a token at most once.
            yield [min(self.tokens, round(self.tokens * self.topk * each / total)) for each in weights]
            weights = [each * (1 + self.drift) ** chance.uniform(-1, 1) for each in weights]


def _power(experts: int, skew: float) -> float:
    """Power p at which the first of 1, 2^-p, 3^-p, ... is `skew` times their mean."""
    low, high = 0.0, 64.0
    for _ in range(80):
        power = (low + high) / 2
        mean = sum((place + 1) ** -power for place in range(experts)) / experts
        low, high = (power, high) if 1 / mean < skew else (low, power)
    return low
