"""Fused products and collectives against sliced ones: a twin of CANN's operators, as documented, over gloo."""

from __future__ import annotations

import sys
import tempfile
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mindspeed_lite.parallel import mc2, pipelined
from tests.parallel.two_layers import results
from tests.platform.forked import forked, on_ranks

RANKS, ROWS, HIDDEN, INNER = 2, 5, 264, 256


class Group:
    """A gloo group with HCCL's way to its name, which the global rank finds."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.asked: list[int] = []

    def _get_backend(self, device: torch.device) -> types.SimpleNamespace:
        assert device.type == "cpu"  # where the twin's tensors are
        return types.SimpleNamespace(get_hccl_comm_name=lambda rank: self.asked.append(rank) or f"hccl-{rank}")


def twin(group: dist.ProcessGroup) -> types.SimpleNamespace:
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


@forked("torch")
def test_both_layers_give_what_they_give_in_one_message():
    folder = Path(tempfile.mkdtemp())

    def body(rank):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
        group = dist.group.WORLD
        named = Group(group)
        sys.modules["torch_npu"] = twin(group)
        communicator = mc2.communicator
        mc2.communicator = lambda _, device: communicator(named, device)
        said = []
        for dtype, fused in ((torch.bfloat16, True), (torch.float32, False)):
            both = [results(each, group, dtype, ROWS, HIDDEN, INNER) for each in (pipelined, mc2.MC2(said.append))]
            assert all(map(torch.equal, *both)), dtype
            if fused:
                assert said == [] and named.asked == [rank] * 4
        assert len(named.asked) == 4 and "MC2 takes float16 or bfloat16" in said[0]

    on_ranks(RANKS, body)


@pytest.mark.parametrize(
    ("dtype", "summed", "ranks", "reason"),
    [
        (torch.float32, 256, 2, "MC2 takes float16 or bfloat16"),
        (torch.bfloat16, 255, 2, "sums over 255 elements"),
        (torch.bfloat16, 65535, 2, "sums over 65535 elements"),
        (torch.bfloat16, 256, 3, "3 ranks"),
    ],
)
def test_what_it_does_not_take(dtype, summed, ranks, reason):
    x, w = torch.empty(2, summed, dtype=dtype), torch.empty(summed, 2, dtype=dtype)
    (found,) = mc2.why_not(x, w, ranks)
    assert reason in found
    assert mc2.why_not(torch.empty(2, 256).half(), torch.empty(256, 2).half(), 8) == []
