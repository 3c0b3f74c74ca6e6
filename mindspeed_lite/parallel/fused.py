"""What operators that multiply and communicate in one have in common: `pipelined`, where they cannot serve a call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist

from . import pipelined
from .pipelined import Pending


class Fused(ABC):
    """`pipelined` by such operators; `say` is told what they cannot do, and then one message serves.

    They cut the work up themselves, so `slices` says nothing here. `why_not` must answer alike on all ranks of a group.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    @abstractmethod
    def why_not(self, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup) -> list[str]:
        """Every reason why the operators cannot multiply x [M, K] by w [K, N] over this group."""

    @abstractmethod
    def _gather(
        self, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of a contiguous x: the product of all rows, and these rows if they are to be kept."""

    @abstractmethod
    def _scatter(self, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Of a contiguous x: this rank's rows of the product's sum over ranks."""

    def gather_matmul(
        self, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, slices: int, keep: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `pipelined.gather_matmul`."""
        if not self._can(x, w, group):
            return pipelined.gather_matmul(x, w, group, 1, keep)
        y, whole = self._gather(x.contiguous(), w, group, keep)
        return y, whole if keep else None

    def matmul_scatter(self, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, slices: int) -> Pending:
        """As `pipelined.matmul_scatter`."""
        if not self._can(x, w, group):
            return pipelined.matmul_scatter(x, w, group, 1)
        return Pending(self._scatter(x.contiguous(), w, group), [], [])

    def _can(self, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup) -> bool:
        reasons = self.why_not(x, w, group)
        if reasons:
            self._say("; ".join(reasons))
        return not reasons
