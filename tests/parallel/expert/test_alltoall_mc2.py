"""Exchange and product in one: a twin of CANN's operators, as documented, over gloo, against separate steps."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist

from mindspeed_lite.ops.grouped_matmul import weight_gradients
from mindspeed_lite.parallel.expert import alltoall_mc2
from mindspeed_lite.parallel.expert.alltoall_mc2 import AlltoAllMC2, ExpertCounts, RowsOfRank, why_not
from tests.harness.fused_collectives import HcclGroup, alltoall_mc2_operators
from tests.harness.process_groups import joined
from tests.harness.processes import forked, on_ranks

HIDDEN, INNER, EACH = 8, 12, 3
# Rows of each rank for each expert of the group.
SENT = [[1, 0, 4, 2, 3, 0], [2, 5, 0, 0, 1, 1]]


@forked("features")
def test_both_products_give_what_separate_steps_give(tmp_path):
    def body(rank):
        group = joined(rank, 2, tmp_path)
        named = HcclGroup(group)
        sys.modules["torch_npu"] = alltoall_mc2_operators(group)
        communicator = alltoall_mc2.communicator
        alltoall_mc2.communicator = lambda _, device: communicator(named, device)
        alltoall_mc2.RANKS, alltoall_mc2.LEAST_BYTES = (2,), 0
        mine = slice(rank * EACH, (rank + 1) * EACH)
        counts = ExpertCounts(SENT[rank], [each for source in SENT for each in source[mine]])
        made = torch.Generator().manual_seed(1)
        everything = [torch.randn(sum(each), HIDDEN, generator=made) for each in SENT]
        fc1 = torch.randn(2 * EACH, INNER, HIDDEN, generator=made)
        fc2 = torch.randn(2 * EACH, HIDDEN, INNER, generator=made)

        def run(dtype, log):
            mc2 = AlltoAllMC2(group, counts, RowsOfRank.of_group(counts, group, torch.device("cpu")), log)
            assert mc2.rows == (7, 12), "fewest and most of what both ranks send and receive"
            x = everything[rank].to(dtype).requires_grad_()
            up, down = ([each.to(dtype).requires_grad_() for each in w[mine]] for w in (fc1, fc2))
            hidden = mc2.dispatch_linear(x, up, weight_gradients)
            out = mc2.linear_combine(torch.tanh(hidden), down, weight_gradients)
            (out**2).sum().backward()
            return [out.detach(), x.grad, *(each.grad for each in (*up, *down))]

        said = []
        fused = run(torch.bfloat16, said.append)
        assert said == [] and named.asked == [rank] * 4
        alltoall_mc2.RANKS = (8,)
        for a, b in zip(fused, run(torch.bfloat16, said.append), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
        assert len(named.asked) == 4 and "2 ranks: the operators take 8" in said[0]
        separate = run(torch.float64, said.append)
        # One process that has every expert.
        rows, weights = [each.double().requires_grad_() for each in everything], (fc1.double(), fc2.double())
        up, down = (w.requires_grad_() for w in weights)
        outs = []
        for x, sent in zip(rows, SENT, strict=True):
            parts = [torch.tanh(part @ up[e].t()) @ down[e].t() for e, part in enumerate(x.split(sent))]
            outs.append(torch.cat(parts))
        sum((out**2).sum() for out in outs).backward()
        exact = [outs[rank].detach(), rows[rank].grad, *up.grad[mine], *down.grad[mine]]
        for a, b in zip(separate, exact, strict=True):
            torch.testing.assert_close(a, b)
        dist.barrier()

    on_ranks(2, body)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dtype": torch.float32}, "take float16 or bfloat16"),
        ({"ranks": 4}, "4 ranks: the operators take 8"),
        ({"experts": 33}, "33 experts"),
        ({"experts": 16, "ranks": 32}, "16 experts on each of 32 ranks"),
        ({"width": 65536, "rows": RowsOfRank(700, 700)}, "65536 columns"),
        ({"rows": RowsOfRank(1000, 4096)}, "a rank with 1000 rows of 1024 columns has less than 2 MiB"),
        ({"rows": RowsOfRank(4096, 30000)}, "a rank with 30000 rows of 2048 columns has more than 100 MiB"),
    ],
)
def test_what_the_operators_do_not_take(change, text):
    given = {"dtype": torch.bfloat16, "width": 1024, "experts": 8, "rows": RowsOfRank(4096, 5000), "ranks": 8}
    changed = {**given, **change}
    x = torch.empty(0, 2048, dtype=changed.pop("dtype"))
    (reason,) = why_not(x, **changed)
    assert text in reason
    given.pop("dtype")
    assert why_not(torch.empty(0, 2048, dtype=torch.bfloat16), **given) == []
