"""Rows that are exchanged again: what comes back, once, and what happens between leaving and arriving."""

from __future__ import annotations

import torch

from mindspeed_lite.parallel.expert.exchange import AllToAll
from mindspeed_lite.parallel.expert.recomputed_rows import RecomputedRows
from tests.harness.process_groups import joined
from tests.harness.processes import forked, on_ranks

# Rank 1 is sent nothing.
SENT = [[3, 0], [2, 0]]


class _Kept(torch.autograd.Function):
    """x w, for whose gradient x is read when `arrive` has been called."""

    @staticmethod
    def forward(ctx, x, w, arrive):
        ctx.save_for_backward(x, w)
        ctx.arrive = arrive
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        ctx.arrive()
        return grad @ w.t(), x.t() @ grad, None


@forked("features")
def test_rows_come_back_as_they_were(tmp_path):
    def body(rank):
        group = joined(rank, 2, tmp_path)
        exchange = AllToAll([each[rank] for each in SENT], SENT[rank], group)
        torch.manual_seed(rank)
        tokens = torch.randn(sum(SENT[rank]), 4, dtype=torch.float64)
        ran = []

        def permute():
            ran.append("permuted")
            return tokens.flip(0)

        def order(received):
            ran.append("ordered")
            return received.flip(0)

        work, received = exchange.start(permute().contiguous())
        work.wait()
        x = order(received)
        w = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        expected = x.t() @ torch.ones(len(x), 3, dtype=torch.float64)
        rows = RecomputedRows(permute, exchange, order)
        ran.clear()
        y = _Kept.apply(x, w, rows.arrive)
        rows.release(x)
        assert x.untyped_storage().nbytes() == 0
        y.register_hook(lambda _: rows.leave())
        y.sum().backward()
        assert torch.equal(w.grad, expected) and bool((w.grad != 0).any()) == (rank == 0)
        assert ran == ["permuted", "ordered"]
        rows.leave()
        rows.arrive()
        assert ran == ["permuted", "ordered"], "once"

    on_ranks(2, body)
