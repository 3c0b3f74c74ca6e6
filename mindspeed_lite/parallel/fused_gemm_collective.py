"""Runs a GEMM and its collective as one operator, with `overlapped_gemm` as the fallback."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist

from . import overlapped_gemm
from .overlapped_gemm import Pending


class FusedGemmCollective(ABC):
    """`OverlappedGemm` by fused operators; a call they cannot serve runs unchunked, and `say` gets the reason.

    They cut the work up themselves, so `chunks` says nothing here. `why_not` must answer alike on all ranks of a group.
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
        self, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, chunks: int, keep: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `overlapped_gemm.gather_matmul`."""
        if not self._can(x, w, group):
            return overlapped_gemm.gather_matmul(x, w, group, 1, keep)
        y, whole = self._gather(x.contiguous(), w, group, keep)
        return y, whole if keep else None

    def matmul_scatter(self, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, chunks: int) -> Pending:
        """As `overlapped_gemm.matmul_scatter`."""
        if not self._can(x, w, group):
            return overlapped_gemm.matmul_scatter(x, w, group, 1)
        return Pending(self._scatter(x.contiguous(), w, group), [], [])

    def _can(self, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup) -> bool:
        reasons = self.why_not(x, w, group)
        if reasons:
            self._say("; ".join(reasons))
        return not reasons
