"""Predicts the load of experts as the exponential average of what all ranks have counted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

# Averages are sent as integers, in this part of a token: so they add up to the same on every rank.
_PARTS = 1024


class LoadAverage:
    """Tokens of each expert in a step: the exponential average of what one layer has counted on this rank.

    Args:
        experts: of the layer, over all ranks.
        decay: weight of the past, below 1.
    """

    def __init__(self, experts: int, device: torch.device, decay: float = 0.9) -> None:
        self._counts = torch.zeros(experts, dtype=torch.int64, device=device)
        self._average = torch.zeros(experts, dtype=torch.float32, device=device)
        self._decay = decay
        self._weight = 0.0

    def add(self, routing_map: torch.Tensor) -> None:
        """Count one micro-batch; the host does not wait.

        Args:
            routing_map: bool [tokens, experts].
        """
        self._counts += routing_map.sum(0, dtype=torch.int64)

    def end_step(self) -> None:
        """What comes next belongs to another step."""
        self._average.mul_(self._decay).add_(self._counts, alpha=1 - self._decay)
        self._weight = self._decay * self._weight + 1 - self._decay
        self._counts.zero_()

    def parts(self) -> torch.Tensor:
        """int64 [experts]."""
        return (self._average * (_PARTS / (self._weight or 1.0))).round().to(torch.int64)


def predicted(averages: Sequence[LoadAverage], group: dist.ProcessGroup) -> list[list[float]]:
    """[layers][experts], tokens in a step over all ranks of the group; alike on all of them. A collective."""
    parts = torch.stack([each.parts() for each in averages])
    dist.all_reduce(parts, group=group)
    found: list[list[float]] = (parts.to("cpu", torch.float64) / _PARTS).tolist()
    return found


def alike(numbers: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[bool]:
    """Which of the numbers are the same on all ranks of the group. A collective."""
    sent = torch.tensor([[each, -each] for each in numbers], dtype=torch.int64, device=device)
    dist.all_reduce(sent, dist.ReduceOp.MAX, group=group)
    return [largest == -smallest for largest, smallest in sent.tolist()]


__all__ = ["LoadAverage", "alike", "predicted"]
