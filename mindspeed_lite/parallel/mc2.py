"""Products and collectives in one operator of CANN: all-gather with product, product with reduce-scatter (MC2).

As `pipelined`, on Ascend NPUs over HCCL; the device cuts the work up itself, so `slices` says nothing here. Where the
operators cannot serve a call, `pipelined` does, in one message, and `say` is told why. That depends on sizes and dtypes
alone, which are the same on every rank.

Source: documentation of torch_npu.npu_all_gather_base_mm and npu_mm_reduce_scatter_base (op-plugin 7.3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from . import pipelined
from .pipelined import Pending

# What the operators take: ranks of a group (Atlas A2: up to 8, A3: up to 32), and the dimension that is summed over.
RANKS = (2, 4, 8, 16, 32)
SUMMED = range(256, 65535)


def why_not(x: torch.Tensor, w: torch.Tensor, ranks: int) -> list[str]:
    """Every reason why the fused operators cannot multiply x [M, K] by w [K, N] over so many ranks."""
    reasons = []
    if x.dtype not in (torch.float16, torch.bfloat16) or w.dtype != x.dtype:
        reasons.append(f"{x.dtype} times {w.dtype}: MC2 takes float16 or bfloat16")
    if x.shape[1] not in SUMMED:
        reasons.append(f"a product that sums over {x.shape[1]} elements: MC2 takes 256 to 65534")
    if ranks not in RANKS:
        reasons.append(f"{ranks} ranks: MC2 takes {', '.join(map(str, RANKS))}")
    return reasons


class Fused:
    """`pipelined` by the fused operators; `say` is told what they cannot do."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def gather_matmul(
        self, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, slices: int, keep: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `pipelined.gather_matmul`."""
        if not self._can(x, w, group):
            return pipelined.gather_matmul(x, w, group, 1, keep)
        import torch_npu  # type: ignore[import-not-found, import-untyped, unused-ignore]

        y, gathered = torch_npu.npu_all_gather_base_mm(
            x.contiguous(),  # [m, K]: may not be a transposed view
            w,  # [K, N]: may be one
            communicator(group, x.device),
            group.size(),
            gather_output=keep,
        )
        return y, gathered if keep else None

    def matmul_scatter(self, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, slices: int) -> Pending:
        """As `pipelined.matmul_scatter`."""
        if not self._can(x, w, group):
            return pipelined.matmul_scatter(x, w, group, 1)
        import torch_npu

        y = torch_npu.npu_mm_reduce_scatter_base(
            x.contiguous(),  # [p m, K]
            w,
            communicator(group, x.device),
            group.size(),
            reduce_op="sum",
        )
        return Pending(y, [], [])

    def _can(self, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup) -> bool:
        reasons = why_not(x, w, group.size())
        if reasons:
            self._say("; ".join(reasons))
        return not reasons


def communicator(group: Any, device: torch.device) -> str:
    """HCCL's name for the group's communicator, by which CANN finds it."""
    backend = group._get_backend(device)
    return str(backend.get_hccl_comm_name(dist.get_rank()))
