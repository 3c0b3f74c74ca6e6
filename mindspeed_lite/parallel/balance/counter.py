"""Counts tokens by layer and expert on the device, and adds the counts of all ranks in one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .record import LoadStep


@dataclass(frozen=True)
class ExpertPlace:
    """Which experts a rank sends its tokens to: the replica of all experts, and how that is spread over ranks."""

    replica: int
    replicas: int
    expert_parallel: int


class LoadCounter:
    """Counts of one rank for up to `interval` steps.

    Args:
        layers: rows; a rank counts in those of its own layers.
        experts: experts of a layer, over all ranks.
        interval: steps between two messages.
        device: where routing maps are.
    """

    def __init__(self, layers: int, experts: int, interval: int, device: torch.device) -> None:
        self.shape = layers, experts
        # A step of 2^31 choices in one layer does not exist.
        self._counts = torch.zeros(interval, layers, experts, dtype=torch.int32, device=device)
        self._tokens = [[0] * layers for _ in range(interval)]
        self._steps: list[int] = []
        # Of experts at other places: number of the step and row -> the expert at each place.
        self._experts_at: dict[tuple[int, int], Sequence[int]] = {}

    @property
    def steps(self) -> int:
        """Steps that have been counted since the last message."""
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        return len(self._steps) == len(self._tokens)

    def add(self, row: int, routing_map: torch.Tensor) -> None:
        """Count a micro-batch of one layer; the host does not wait.

        Args:
            row: of the layer, from 0.
            routing_map: bool [tokens, experts], the experts of each of this rank's own tokens.
        """
        place = len(self._steps)
        self._counts[place, row].add_(routing_map.sum(0, dtype=torch.int32))
        self._tokens[place][row] += routing_map.shape[0]

    def end_step(self, step: int, experts_at: Mapping[int, Sequence[int]] | None = None) -> None:
        """What comes next belongs to another step. At most `interval` steps fit between two messages.

        Args:
            experts_at: rows whose experts were not in their order -> [experts], the expert at each place.
        """
        self._experts_at.update({(len(self._steps), row): each for row, each in (experts_at or {}).items()})
        self._steps.append(step)

    def take(self, place: ExpertPlace, group: dist.ProcessGroup | None = None) -> tuple[list[int], list[LoadStep]]:
        """Add the counts of all ranks up, and begin anew. A collective: every rank calls it after the same step.

        Args:
            group: all ranks that train the model; None for one rank alone.

        Returns:
            On the group's first rank the rows that have counted a token, and the steps with these rows; on other ranks
            nothing.
        """
        steps, (layers, experts) = self._steps, self.shape
        ranks = place.replicas * place.expert_parallel
        counts = self._counts[: len(steps)]
        by_place = counts.clone() if self._experts_at else counts
        for where, order in self._experts_at.items():
            by_place[where] = counts[where][torch.tensor(order, device=counts.device)]
        # Ranks hold neighbouring places in their order.
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
