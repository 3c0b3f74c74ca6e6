"""Where symmetric memory cannot serve, and why; `tests/patches/test_use_ascend_coc.py` runs its operators."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from mindspeed_lite.parallel import symmetric
from tests.harness.process_groups import joined
from tests.harness.processes import forked, on_ranks

RANKS = 2


@forked("torch")
def test_what_a_group_lacks_is_said_on_every_rank_and_goes_in_one_message():
    folder = Path(tempfile.mkdtemp())

    def body(rank):
        group = joined(rank, RANKS, folder)
        said = []
        gemm = symmetric.Symmetric(said.append)
        x, w = torch.randn(3, 8) + rank, torch.randn(8, 4, generator=torch.Generator().manual_seed(1))

        def go():
            y, whole = gemm.gather_matmul(x, w, group, 4, keep=True)
            assert torch.equal(y, whole @ w) and whole.shape == (3 * RANKS, 8)
            assert gemm.matmul_scatter(whole, w, group, 4).wait().shape == (3, 4)

        go()
        assert said == ["symmetric memory is that of CUDA devices, and this is cpu"] * 2
        # One rank alone has something in its way.
        symmetric._found.clear()
        symmetric._alone = lambda device: "no memory" if rank else None
        go()
        assert said[2:] == ["no memory"] * 2
        symmetric._found.clear()
        symmetric._alone = lambda device: None
        symmetric.socket.gethostname = lambda: f"host{rank}"
        go()
        assert said[4:] == ["the group's ranks are on 2 hosts, and symmetric memory is that of one"] * 2
        symmetric._found.clear()
        symmetric.socket.gethostname = lambda: "host"
        symmetric._reaches = lambda device, other: rank == 0
        go()
        assert said[6:] == ["the group's devices do not reach each other's memory"] * 2
        assert not gemm._can(x.half(), w, group)
        assert said[8:] == ["torch.float16 times torch.float32"]

    on_ranks(RANKS, body)


@forked("torch")
def test_a_pytorch_without_the_operators_is_a_reason():
    assert symmetric._missing() is None
    symmetric._missing.cache_clear()
    kept, torch.ops.symm_mem = torch.ops.symm_mem, object()
    assert "has no symm_mem::fused_all_gather_matmul with return_A" in symmetric._missing()
    torch.ops.symm_mem = kept
