"""Counts expert tokens on the device, per step and as a moving average."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .placement import DECAY
from .record import LoadStep

# Fixed-point unit (1 / 1024 token): equal sums on every rank.
_PARTS = 1024


@dataclass(frozen=True)
class ExpertPlace:
    replica: int
    replicas: int
    expert_parallel: int


class LoadCounter:
    """One rank's counts by step, layer and expert.

    layers, experts: of the whole model.
    interval: maximum steps between two messages.
    """

    def __init__(self, layers: int, experts: int, interval: int, device: torch.device) -> None:
        self.shape = layers, experts
        self._counts = torch.zeros(interval, layers, experts, dtype=torch.int32, device=device)
        self._tokens = [[0] * layers for _ in range(interval)]
        self._steps: list[int] = []
        # (step index, row) -> expert at each place.
        self._experts_at: dict[tuple[int, int], Sequence[int]] = {}

    @property
    def steps(self) -> int:
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        return len(self._steps) == len(self._tokens)

    def add(self, row: int, routing_map: Tensor) -> None:
        """Add the tokens per expert of a routing map, bool [tokens, experts], without a synchronization."""
        place = len(self._steps)
        self._counts[place, row].add_(routing_map.sum(0, dtype=torch.int32))
        self._tokens[place][row] += routing_map.shape[0]

    def end_step(self, step: int, experts_at: Mapping[int, Sequence[int]] | None = None) -> None:
        """Finish a step; experts_at: row -> expert at each place, for layers whose experts moved."""
        self._experts_at.update({(len(self._steps), row): each for row, each in (experts_at or {}).items()})
        self._steps.append(step)

    def take(self, place: ExpertPlace, group: ProcessGroup | None = None) -> tuple[list[int], list[LoadStep]]:
        """Sum over all ranks and reset. A collective after the same step on every rank.

        Returns:
            On the group's first rank, rows with tokens and the steps with these rows; else nothing.
        """
        steps, (layers, experts) = self._steps, self.shape
        ranks = place.replicas * place.expert_parallel
        counts = self._counts[: len(steps)]
        by_place = counts.clone() if self._experts_at else counts
        for where, order in self._experts_at.items():
            by_place[where] = counts[where][torch.tensor(order, device=counts.device)]
        by_rank = by_place.view(len(steps), layers, place.expert_parallel, -1).sum(-1)
        message = counts.new_zeros(len(steps), layers, experts + ranks + 1)
        message[..., :experts] = counts
        first = experts + place.replica * place.expert_parallel
        message[..., first : first + place.expert_parallel] = by_rank
        message[..., -1] = torch.tensor(self._tokens[: len(steps)], dtype=torch.int32)
        is_reader = True
        if group is not None and group.size() > 1:
            dist.reduce(message, dist.get_global_rank(group, 0), group=group)
            is_reader = group.rank() == 0
        self._counts.zero_()
        self._tokens = [[0] * layers for _ in self._tokens]
        self._steps, self._experts_at = [], {}
        if not is_reader:
            return [], []
        read = message.tolist()
        rows = [row for row in range(layers) if any(each[row][-1] for each in read)]
        return rows, [
            LoadStep(
                step,
                tokens=[each[row][-1] for row in rows],
                experts=[each[row][:experts] for row in rows],
                ranks=[each[row][experts:-1] for row in rows],
            )
            for step, each in zip(steps, read, strict=True)
        ]


class LoadAverage:
    """Exponential average of one layer's tokens by expert."""

    def __init__(self, experts: int, device: torch.device) -> None:
        self._counts = torch.zeros(experts, dtype=torch.int64, device=device)
        self._average = torch.zeros(experts, dtype=torch.float32, device=device)
        self._weight = 0.0

    def add(self, routing_map: Tensor) -> None:
        """Add the tokens per expert of a routing map, bool [tokens, experts], without a synchronization."""
        self._counts += routing_map.sum(0, dtype=torch.int64)

    def end_step(self) -> None:
        self._average.mul_(DECAY).add_(self._counts, alpha=1 - DECAY)
        self._weight = DECAY * self._weight + 1 - DECAY
        self._counts.zero_()

    def parts(self) -> Tensor:
        """int64 [experts], in 1 / 1024 of a token."""
        return (self._average * (_PARTS / (self._weight or 1.0))).round().to(torch.int64)


def predicted_loads(averages: Sequence[LoadAverage], group: ProcessGroup) -> list[list[float]]:
    """[layers][experts], tokens of a step over all ranks. A collective."""
    parts = torch.stack([each.parts() for each in averages])
    dist.all_reduce(parts, group=group)
    found: list[list[float]] = (parts.to("cpu", torch.float64) / _PARTS).tolist()
    return found


def same_on_all_ranks(values: Sequence[int], group: ProcessGroup, device: torch.device) -> list[bool]:
    """Whether each value is equal on all ranks. A collective."""
    sent = torch.tensor([[each, -each] for each in values], dtype=torch.int64, device=device)
    dist.all_reduce(sent, dist.ReduceOp.MAX, group=group)
    return [largest == -smallest for largest, smallest in sent.tolist()]
