"""Simulates expert copies and placement on recorded steps.

Copies see the loads of their step, as in training; a placement sees an exponential average of earlier ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import placement as placements
from .placement import DECAY, hot_experts, loads_with_copies
from .record import LoadRecord

POLICIES = ("none", "copies", "placement", "both")


@dataclass
class PolicyOutcome:
    """Result of one policy over all steps and layers.

    by_step: tokens of the fullest rank of each step over even load. imbalance: the same of all steps.
    copied: copies made. moved: experts that changed rank. stayed: tokens of copied experts that stayed.
    """

    name: str
    by_step: list[float]
    imbalance: float = 1.0
    copied: int = 0
    stayed: float = 0.0
    moved: int = 0


def simulate(
    record: LoadRecord, ranks: int, copies: int = 3, interval: int = 50, break_even: float = 0.0
) -> list[PolicyOutcome]:
    """Run all policies over an expert-parallel group of `ranks`. Raises ValueError if they do not divide the experts.

    copies: maximum per micro-batch. interval: steps between two placements.
    break_even: tokens per step a copy must take off the fullest rank.
    """
    experts = record.header.experts
    home = placements.contiguous(experts, ranks)
    outcomes = [PolicyOutcome(name, [0.0] * len(record.steps)) for name in POLICIES]
    evens = [0.0] * len(record.steps)
    for row in range(len(record.header.layers)):
        placed, average = home, [0.0] * experts
        for at, step in enumerate(record.steps):
            # Replicas, and sources in them, have equal shares of tokens.
            loads = [load / record.header.replicas for load in step.experts[row]]
            sent = [[load / ranks for load in loads]] * ranks
            evens[at] += sum(loads) / ranks
            moves = 0
            if at and at % interval == 0:
                after = placements.chosen(average, placed, ranks)
                moves, placed = placements.moved(after, placed), after
            for outcome in outcomes:
                is_placed, is_copied = outcome.name in ("placement", "both"), outcome.name in ("copies", "both")
                where = placed if is_placed else home
                hot = hot_experts(sent, where, copies, break_even) if is_copied else []
                outcome.by_step[at] += max(loads_with_copies(sent, where, hot))
                outcome.moved += moves if is_placed else 0
                outcome.copied += len(hot)
                outcome.stayed += sum(loads[each] for each in hot) * (ranks - 1) / ranks
            # The first step initialises the average.
            weight = DECAY if at else 0.0
            average = [weight * old + (1 - weight) * new for old, new in zip(average, loads, strict=True)]
    for outcome in outcomes:
        fullest, even = outcome.by_step, sum(evens)
        outcome.imbalance = sum(fullest) / even if even else 1.0
        outcome.by_step = [a / b if b else 1.0 for a, b in zip(fullest, evens, strict=True)]
    return outcomes
