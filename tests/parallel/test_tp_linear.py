"""Linear layers that talk in chunks, on gloo processes: against one product, one collective, and float64."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mindspeed_lite.parallel import overlapped_gemm
from mindspeed_lite.parallel.overlapped_gemm import parts
from mindspeed_lite.parallel.tp_linear import (
    AUTOGRAD_WGRAD,
    TPCommConfig,
    Wgrad,
    column_linear,
    fixed_chunks,
    row_linear,
)  # fmt: skip
from mindspeed_lite.tuning.chunk_autotuner import CANDIDATES, ChunkAutotuner, Trial
from tests.harness.compare import error
from tests.harness.patience import once_of
from tests.harness.process_groups import joined
from tests.harness.processes import forked, on_ranks

INNER, OUTER, BATCH = 24, 20, 2


def tensors(*shapes, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def column_problem(ranks, rows, dtype):
    """X [s, b, K], weight [p N, K], bias [p N], dY [s, b, p N], the same on every rank."""
    return tensors(
        (ranks * rows, BATCH, INNER), (ranks * OUTER, INNER), (ranks * OUTER,), (ranks * rows, BATCH, ranks * OUTER),
        dtype=dtype,
    )  # fmt: skip


def shares(whole, rank, ranks, dim):
    return whole if dim is None else whole.chunk(ranks, dim)[rank]


def leaves(*given):
    return [each.detach().clone().requires_grad_() for each in given]


def whole(x, weight, bias, dy):
    """Output and gradients of one linear layer on one rank, in float64."""
    x, weight, bias = leaves(*(each.double() for each in (x, weight, bias)))
    y = x @ weight.t() + bias
    y.backward(dy.double())
    return y.detach(), x.grad, weight.grad, bias.grad


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize(("ranks", "rows", "chunks"), [(2, 6, 2), (2, 7, 4), (4, 5, 8), (4, 1, 2), (2, 3, 1)])
@forked("torch")
def test_outputs_and_gradients_are_those_of_one_rank(kind, ranks, rows, chunks):
    folder, is_column = Path(tempfile.mkdtemp()), kind == "column"

    def check(rank, group, sequence_parallel, dtype):
        if is_column:
            x, weight, bias, dy = column_problem(ranks, rows, dtype)
        else:
            shapes = (ranks * rows, BATCH, ranks * INNER), (OUTER, ranks * INNER), (ranks * rows, BATCH, OUTER)
            (x, weight, dy), bias = tensors(*shapes, dtype=dtype), torch.zeros(OUTER)
        # Dimensions along which x, the weight and y are split.
        split = 0 if sequence_parallel else None
        of_x, of_weight, of_y = (split, 0, 2) if is_column else (2, 1, split)
        y, dx, dw, db = whole(x, weight, bias, dy)
        mine = {}
        for number in (chunks, 1):
            comm = TPCommConfig(group, sequence_parallel, fixed_chunks(number), AUTOGRAD_WGRAD)
            a, w, c = leaves(
                shares(x, rank, ranks, of_x), shares(weight, rank, ranks, of_weight), shares(bias, rank, ranks, 0)
            )
            if is_column:
                out = column_linear(a, w, c, comm)
                assert out._base is None, "Megatron lets go of the storage of outputs"
            else:
                # Not contiguous: how attention hands over its output under some layouts.
                out = row_linear(a.transpose(0, 1).contiguous().transpose(0, 1), w, comm)
            out.backward(shares(dy, rank, ranks, of_y))
            mine[number] = {"y": out.detach(), "dx": a.grad, "dw": w.grad, **({"db": c.grad} if is_column else {})}
        exact = {
            "y": shares(y, rank, ranks, of_y), "dx": shares(dx, rank, ranks, of_x),
            "dw": shares(dw, rank, ranks, of_weight), "db": shares(db, rank, ranks, 0),
        }  # fmt: skip
        slack = 2 * torch.finfo(dtype).eps
        for name, ours in mine[chunks].items():
            plain, truth = mine[1][name], exact[name]
            assert ours.shape == truth.shape and ours.dtype == dtype
            assert error(ours, truth) <= error(plain, truth) + slack <= 4 * slack, name
            if name in ("dw", "db"):
                assert torch.equal(ours, plain), f"{name} is one product, whatever the chunks"

    def body(rank):
        group = joined(rank, ranks, folder)
        for sequence_parallel in (True, False):
            for dtype in (torch.float32, torch.bfloat16):
                check(rank, group, sequence_parallel, dtype)

    on_ranks(ranks, body)


@forked("torch")
def test_what_is_frozen_costs_nothing_and_what_is_left_to_others_is_whole():
    folder = Path(tempfile.mkdtemp())

    def later(*shape):
        """A gradient that is given away, and what was."""
        given = []
        return Wgrad(None, lambda dy: given.append(dy) or True, lambda: torch.full(shape, 7.0)), given

    def body(rank):
        group = joined(rank, 2, folder)
        gathers = []
        wrapped = dist.all_gather_into_tensor

        def counted(out, *args, **kwargs):
            gathers.append(out.numel())
            return wrapped(out, *args, **kwargs)

        dist.all_gather_into_tensor = counted
        x, weight, _, dy = column_problem(2, 4, torch.float32)
        deferred, given = later(OUTER, INNER)
        for gradient, frozen in ((AUTOGRAD_WGRAD, True), (deferred, False)):
            a, w = leaves(shares(x, rank, 2, 0), shares(weight, rank, 2, 0))
            y = column_linear(
                a, w.requires_grad_(not frozen), None, TPCommConfig(group, True, fixed_chunks(2), gradient)
            )
            assert len(y.grad_fn.saved_tensors) == 2 and (y.grad_fn.saved_tensors[0] is None) == frozen
            gathers.clear()
            y.backward(shares(dy, rank, 2, 2))
            assert gathers == [] and a.grad is not None
            # What gradient reduction looks for.
            assert w.grad is None if frozen else w.grad.eq(7).all()
        assert torch.equal(given[0], shares(dy, rank, 2, 2))
        deferred, given = later(OUTER, INNER // 2)
        a, w = leaves(shares(x, rank, 2, 2), shares(weight, rank, 2, 1)[:OUTER])
        row_linear(a, w, TPCommConfig(group, True, fixed_chunks(2), deferred)).backward(
            shares(dy[..., :OUTER], rank, 2, 0)
        )
        assert w.grad.eq(7).all()
        assert torch.equal(given[0], dy[..., :OUTER]), "gathered, in the order of the rows"

    on_ranks(2, body)


@pytest.mark.parametrize(
    ("device", "order"),
    [
        ("cpu", "send send send own receive other receive other receive other"),
        ("meta", "send own send receive other send receive other receive other"),
    ],
)
def test_one_hardware_queue_never_holds_a_product_back(monkeypatch, device, order):
    """Order of issue: on a device a message goes before the product that it overlaps with, not before earlier ones."""
    issued = []
    rows, group = 6, SimpleNamespace(size=lambda: 2, rank=lambda: 0)

    class Torch:
        """torch that records products."""

        def mm(self, x, w, out):
            issued.append("own" if len(x) == rows else "other")

        def __getattr__(self, name):
            return getattr(torch, name)

    def gather(*_, **__):
        issued.append("send")
        return SimpleNamespace(wait=lambda: issued.append("receive"))

    monkeypatch.setattr(overlapped_gemm, "torch", Torch())
    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    x, w = torch.zeros(rows, 4, device=device), torch.zeros(4, 4, device=device)
    overlapped_gemm.gather_matmul(x, w, group, 3)
    assert issued == order.split()


def test_slices_need_not_divide_the_rows():
    assert [(each.start, each.stop) for each in parts(7, 4)] == [(0, 1), (1, 3), (3, 5), (5, 7)]
    assert [(each.start, each.stop) for each in parts(2, 8)] == [(0, 1), (1, 2)]
    assert list(parts(0, 4)) == [slice(0, 0)] and list(parts(5, 1)) == [slice(0, 5)]
    for rows in range(1, 40):
        for chunks in (1, 2, 4, 8):
            runs = list(parts(rows, chunks))
            lengths = [each.stop - each.start for each in runs]
            assert sum(lengths) == rows and max(lengths) - min(lengths) <= 1 and len(runs) == min(chunks, rows)


def test_noise_does_not_choose():
    whole = [1.0, 1.1, 0.9, 1.0, 1.0, 1.3, 1.0]

    def trial(**factors):
        rounds = {1: whole, **{int(name[1:]): [each * factor for each in whole] for name, factor in factors.items()}}
        return Trial(rounds)

    assert trial(n2=0.98, n4=1.2).best == 1
    assert trial(n2=0.8, n4=0.79).best == 4
    assert "1 chunk, because more are not clearly faster" in str(trial(n2=1.1))
    # Faster in the middle, but not in enough of the rounds.
    assert Trial({1: whole, 2: [0.5, 0.5, 0.5, 0.5, 0.5, 1.4, 1.1]}).best == 1
    assert Trial({1: whole, 2: [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 1.1]}).best == 2


@once_of(8)
@forked("torch")
def test_every_rank_takes_the_choice_of_the_slowest():
    """Rank 0 is faster with two chunks, rank 1 slower by more: both stay with one. A known shape is not tried again."""
    folder = Path(tempfile.mkdtemp())

    def body(rank):
        group = joined(rank, 2, folder)
        said, runs = [], []
        trials = ChunkAutotuner(group, said.append)
        x, w = torch.zeros(20, 4), torch.zeros(4, 6)

        def run(chunks):
            runs.append(chunks)
            time.sleep(0.02 if chunks == 1 else (0.01, 0.04)[rank])

        assert trials.known("a", x, w, run) == 1 and not runs
        assert trials("a", x, w, run) == 1
        assert set(runs) == {1, 2} < set(CANDIDATES), "four chunks of 20 rows are too small to be worth a message"
        count = len(runs)
        assert trials("a", x, w, run) == trials.known("a", x, w, run) == 1 and len(runs) == count
        assert len(said) == (rank == 0) and all("20 rows, 4 x 6: 1 chunk," in text for text in said)

        def better(chunks):
            time.sleep(0.06 if chunks == 1 else 0.01)

        assert trials("b", x, w, better) == trials.known("b", x, w, better) == 2

    on_ranks(2, body)
