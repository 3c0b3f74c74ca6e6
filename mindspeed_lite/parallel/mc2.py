"""Fused GEMM and collective (CANN MC2) on Ascend NPUs.

Source: documentation of torch_npu.npu_all_gather_base_mm and npu_mm_reduce_scatter_base (op-plugin 7.3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .overlapped_gemm import FusedGemmCollective

# Group sizes (Atlas A2: up to 8, A3: up to 32), sizes of the reduced dimension.
RANKS = (2, 4, 8, 16, 32)
SUMMED = range(256, 65535)


def why_not(x: Tensor, w: Tensor, ranks: int) -> list[str]:
    """Reasons why the operators cannot multiply x [M, K] by w [K, N]; the same on all ranks."""
    reasons = []
    if x.dtype not in (torch.float16, torch.bfloat16) or w.dtype != x.dtype:
        reasons.append(f"{x.dtype} times {w.dtype}: MC2 takes float16 or bfloat16")
    if x.shape[1] not in SUMMED:
        reasons.append(f"a product that sums over {x.shape[1]} elements: MC2 takes 256 to 65534")
    if ranks not in RANKS:
        reasons.append(f"{ranks} ranks: MC2 takes {', '.join(map(str, RANKS))}")
    return reasons


class MC2(FusedGemmCollective):
    """GEMMs and collectives by CANN's two operators."""

    def why_not(self, x: Tensor, w: Tensor, group: ProcessGroup) -> list[str]:
        return why_not(x, w, group.size())

    def _gather(self, x: Tensor, w: Tensor, group: ProcessGroup, keep: bool) -> tuple[Tensor, Tensor | None]:
        import torch_npu  # type: ignore[import-not-found, import-untyped, unused-ignore]

        # x may not be a transposed view; w may.
        name = communicator(group, x.device)
        y, gathered = torch_npu.npu_all_gather_base_mm(x, w, name, group.size(), gather_output=keep)
        return y, gathered

    def _scatter(self, x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
        import torch_npu

        name = communicator(group, x.device)
        y: Tensor = torch_npu.npu_mm_reduce_scatter_base(x, w, name, group.size(), reduce_op="sum")
        return y


def communicator(group: Any, device: torch.device) -> str:
    """HCCL communicator name of the group."""
    backend = group._get_backend(device)
    return str(backend.get_hccl_comm_name(dist.get_rank()))
