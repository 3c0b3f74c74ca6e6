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


def alltoall_mc2_operators(group: dist.ProcessGroup) -> types.SimpleNamespace:
    """What the documentation says of exchange and grouped product in one, expert by expert and rank by rank."""

    def check(x, w, hcom, world_size, sent, received, mm_x, mm_weight):
        assert hcom == f"hccl-{dist.get_rank()}" and world_size == group.size()
        assert x.dim() == 2 and w.dim() == 3 and x.dtype == w.dtype and x.dtype in (torch.float16, torch.bfloat16)
        assert x.is_contiguous() and len(sent) == len(received) == len(w) * world_size
        assert all(isinstance(each, int) for each in (*sent, *received)) and mm_x is None and mm_weight is None

    def moved(x, received, sent):
        # A message for every pair of a rank and an expert.
        ranks, each = group.size(), len(sent) // group.size()
        out, parts = [], [*x.split(sent)]
        for expert in range(each):
            to = [parts[rank * each + expert] for rank in range(ranks)]
            back = [x.new_empty(received[rank * each + expert], x.shape[1]) for rank in range(ranks)]
            sizes = [len(part) for part in back], [len(part) for part in to]
            whole = x.new_empty(sum(sizes[0]), x.shape[1])
            dist.all_to_all_single(whole, torch.cat(to), *sizes, group=group)
            out.append(whole)
        return out

    def products(rows, w, transposed):
        return [part @ (weight.t() if transposed else weight) for part, weight in zip(rows, w, strict=True)]

    def npu_alltoallv_gmm(x, w, hcom, world_size, sent, received, *, send_counts_tensor=None, recv_counts_tensor=None,
                          mm_x=None, mm_weight=None, trans_gmm_weight=False, permute_out_flag=False):  # fmt: skip
        check(x, w, hcom, world_size, sent, received, mm_x, mm_weight)
        assert len(x) == sum(sent)
        rows = moved(x, received, sent)
        arrived = torch.cat(rows) if permute_out_flag else x.new_empty(0)
        return torch.cat(products(rows, w, trans_gmm_weight)), x.new_empty(0), arrived

    def npu_gmm_alltoallv(x, w, hcom, world_size, sent, received, *, send_counts_tensor=None, recv_counts_tensor=None,
                          mm_x=None, mm_weight=None, trans_gmm_weight=False):  # fmt: skip
        check(x, w, hcom, world_size, sent, received, mm_x, mm_weight)
        ranks, each = world_size, len(w)
        of_expert = [sum(sent[expert::each]) for expert in range(each)]
        y = products(x.split(of_expert), w, trans_gmm_weight)
        chunks = [part.split([sent[rank * each + expert] for rank in range(ranks)]) for expert, part in enumerate(y)]
        by_rank = torch.cat([chunks[expert][rank] for rank in range(ranks) for expert in range(each)])
        rows = moved(by_rank, received, sent)
        back = [part.split([received[rank * each + e] for rank in range(ranks)]) for e, part in enumerate(rows)]
        return torch.cat([back[expert][rank] for rank in range(ranks) for expert in range(each)]), x.new_empty(0)

    return types.SimpleNamespace(npu_alltoallv_gmm=npu_alltoallv_gmm, npu_gmm_alltoallv=npu_gmm_alltoallv)


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
