"""Fused products and collectives against chunked ones: a twin of CANN's operators, as documented, over gloo."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mindspeed_lite.parallel import mc2, overlapped_gemm
from tests.harness.fused_collectives import HcclGroup, mc2_operators
from tests.harness.processes import forked, on_ranks
from tests.parallel.tp_layers import results

RANKS, ROWS, HIDDEN, INNER = 2, 5, 264, 256


@forked("torch")
def test_both_layers_give_what_they_give_in_one_message():
    folder = Path(tempfile.mkdtemp())

    def body(rank):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
        group = dist.group.WORLD
        named = HcclGroup(group)
        sys.modules["torch_npu"] = mc2_operators(group)
        communicator = mc2.communicator
        mc2.communicator = lambda _, device: communicator(named, device)
        said = []
        for dtype, fused in ((torch.bfloat16, True), (torch.float32, False)):
            both = [
                results(each, group, dtype, ROWS, HIDDEN, INNER) for each in (overlapped_gemm, mc2.MC2(said.append))
            ]
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
