"""Products and collectives over symmetric memory: PyTorch's fallbacks of its operators, over gloo, and one message."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from mindspeed_lite.parallel import pipelined, symmetric
from tests.parallel.two_layers import results
from tests.platform.forked import forked, on_ranks

RANKS, ROWS, HIDDEN, INNER = 2, 5, 24, 16


def twin():
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


def begin(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    return dist.group.WORLD


@forked("torch")
def test_both_layers_give_what_they_give_in_one_message():
    folder = Path(tempfile.mkdtemp())

    def body(rank):
        group = begin(rank, folder)
        library, calls = twin()
        # What it would say of a CPU.
        symmetric._alone = lambda device: None
        said = []
        for dtype in (torch.bfloat16, torch.float32):
            fused = symmetric.Symmetric(said.append)
            both = [results(each, group, dtype, ROWS, HIDDEN, INNER) for each in (pipelined, fused)]
            assert all(map(torch.equal, *both)), dtype
        name = group.group_name
        forward = [("gather", 0, name, False, True), ("scatter", "sum", 0, name, True)]
        # The row parallel layer keeps what it gathers, for its weight's gradient.
        assert calls == [*forward, ("gather", 0, name, True, True), ("scatter", "sum", 0, name, True)] * 2
        assert said == []
        library._destroy()

    on_ranks(RANKS, body)


@forked("torch")
def test_what_a_group_lacks_is_said_on_every_rank_and_goes_in_one_message():
    folder = Path(tempfile.mkdtemp())

    def body(rank):
        group = begin(rank, folder)
        said = []
        products = symmetric.Symmetric(said.append)
        x, w = torch.randn(3, 8) + rank, torch.randn(8, 4, generator=torch.Generator().manual_seed(1))

        def go():
            y, whole = products.gather_matmul(x, w, group, 4, keep=True)
            assert torch.equal(y, whole @ w) and whole.shape == (3 * RANKS, 8)
            assert products.matmul_scatter(whole, w, group, 4).wait().shape == (3, 4)

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
        assert not products._can(x.half(), w, group)
        assert said[8:] == ["torch.float16 times torch.float32"]

    on_ranks(RANKS, body)


@forked("torch")
def test_a_pytorch_without_the_operators_is_a_reason():
    assert symmetric._missing() is None
    symmetric._missing.cache_clear()
    kept, torch.ops.symm_mem = torch.ops.symm_mem, object()
    assert "has no symm_mem::fused_all_gather_matmul with return_A" in symmetric._missing()
    torch.ops.symm_mem = kept
