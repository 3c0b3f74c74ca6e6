"""Operators that multiply and communicate at once, as documented of CANN and of symmetric memory, over gloo."""

from __future__ import annotations

import types

import torch
import torch.distributed as dist


class HcclGroup:
    """A gloo group with HCCL's way to its name, which the global rank finds."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.asked: list[int] = []

    def _get_backend(self, device: torch.device) -> types.SimpleNamespace:
        assert device.type == "cpu"  # where the operators' tensors are
        return types.SimpleNamespace(get_hccl_comm_name=lambda rank: self.asked.append(rank) or f"hccl-{rank}")


def mc2_operators(group: dist.ProcessGroup) -> types.SimpleNamespace:
    """What the documentation says of the two operators, by plain collectives: no slices, fp32 sums of 16-bit values."""

    def check(x: torch.Tensor, w: torch.Tensor, hcom: str, world_size: int) -> None:
        assert hcom == f"hccl-{dist.get_rank()}" and world_size == group.size()
        assert x.dim() == w.dim() == 2 and x.dtype == w.dtype and x.dtype in (torch.float16, torch.bfloat16)
        assert x.is_contiguous() and 256 <= x.shape[1] < 65535

    def npu_all_gather_base_mm(x, w, hcom, world_size, *, bias=None, gather_index=0, gather_output=True):
        check(x, w, hcom, world_size)
        assert bias is None and gather_index == 0
        whole = x.new_empty(world_size * x.shape[0], x.shape[1])
        dist.all_gather_into_tensor(whole, x, group=group)
        return whole @ w, whole if gather_output else x.new_empty(0)

    def npu_mm_reduce_scatter_base(x, w, hcom, world_size, *, reduce_op="sum", bias=None):
        check(x, w, hcom, world_size)
        assert bias is None and reduce_op == "sum" and x.shape[0] % world_size == 0
        out = x.new_empty(x.shape[0] // world_size, w.shape[1])
        dist.reduce_scatter_tensor(out, x @ w, group=group)
        return out

    return types.SimpleNamespace(
        npu_all_gather_base_mm=npu_all_gather_base_mm, npu_mm_reduce_scatter_base=npu_mm_reduce_scatter_base
    )


def symmetric_memory_operators():
    """CPU kernels for the two operators, which PyTorch has for CUDA alone; returns who keeps them, and their calls."""
    import torch.distributed._symmetric_memory as operators

    calls = []

    def gather(x, weights, dim, name, *, return_A=True):
        calls.append(("gather", dim, name, return_A, x.is_contiguous()))
        return operators._fused_all_gather_matmul_fallback(x, weights, dim, name, return_A=return_A)

    def scatter(x, w, op, dim, name):
        calls.append(("scatter", op, dim, name, x.is_contiguous()))
        return operators._fused_matmul_reduce_scatter_fallback(x, w, op, dim, name)

    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", gather, "CPU")
    library.impl("fused_matmul_reduce_scatter", scatter, "CPU")
    return library, calls
