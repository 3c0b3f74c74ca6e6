"""Copies of experts: outputs and every gradient against one process in float64, and what ranks then compute."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mindspeed_lite.parallel.balance import copies, placement
from mindspeed_lite.parallel.balance.placement import hot_experts, loads_with_copies
from tests.harness.process_groups import joined
from tests.harness.processes import forked, on_ranks
from tests.parallel.expert_copies import KINDS, run
from tests.parallel.expert_hierarchy import Problem, definition

NAMES = ("output", "d tokens", "d probs", "d weight")
# A problem, and which experts are copied: of several ranks, of one, none, all, and ranks without tokens.
CASES = [
    (Problem(4, 8, (9, 3, 0, 7), 2), (5, 0, 1)),
    (Problem(4, 8, (9, 3, 8, 7), 3), (2, 3)),
    (Problem(4, 8, (2, 3, 4, 5), 2), ()),
    (Problem(4, 4, (5, 3, 0, 7), 2), (3, 0, 1, 2)),
    (Problem(4, 12, (0, 0, 6, 0), 4, idle=(3,)), (4, 3)),
    (Problem(4, 8, (0, 0, 0, 0), 2), (6,)),
]


def wrong(found, exact, rank):
    return [name for name in NAMES if not torch.allclose(found[name], exact[name][rank], rtol=1e-9, atol=1e-12)]


@forked("features")
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_one_process(tmp_path, kind):
    def body(rank):
        group = joined(rank, 4, tmp_path)
        for problem, copied in CASES:
            found = run(problem, rank, group, copied, kind)
            assert wrong(found, definition(problem), rank) == [], f"{problem} {copied}"

    on_ranks(4, body)


@forked("features")
def test_ranks_compute_what_the_choice_foresaw(tmp_path):
    def body(rank):
        group = joined(rank, 4, tmp_path)
        for problem, _ in CASES:
            counts = [problem.of_rank(each)[1].sum(0).tolist() for each in range(4)]
            placed = placement.contiguous(problem.experts, 4)
            copied = hot_experts(counts, placed, 3)
            found = run(problem, rank, group, copied, "autograd")
            assert found["rows"].item() == loads_with_copies(counts, placed, copied)[rank]

    on_ranks(4, body)


@forked("features")
@pytest.mark.parametrize("mode", ["finished", "closed", "accumulated"])
def test_gradients_are_summed_in_fp32_and_rounded_once(tmp_path, mode):
    """bf16 copies whose gradients are 1, 2^-9, 2^-9 and 2^-9: a sum in bf16 would stay 1."""

    def body(rank):
        group = joined(rank, 4, tmp_path)
        accumulates, gradient = mode == "accumulated", 1.0 if rank == 1 else 2.0**-9
        weight = torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True)
        weight.main_grad = torch.zeros(2, 2, dtype=torch.bfloat16 if accumulates else torch.float32)
        pending = copies.PendingGradients()
        made = copies.CopyPlan([1], [weight], group, pending, accumulates).make([[weight] if rank == 1 else None])
        made.wait()
        (copy,) = made.of(0)
        assert copy.dtype == torch.bfloat16 and torch.equal(copy, torch.ones_like(copy))
        if accumulates:
            assert copy.main_grad.dtype == torch.bfloat16
            copy.main_grad.add_(gradient)
        if mode == "closed":
            pending.close()
        (copy * (0.0 if accumulates else gradient)).sum().backward()
        if mode != "closed":
            pending.finish()
        expected = torch.full((2, 2), 1 + 3 * 2.0**-9 if rank == 1 else 0.0)
        assert torch.equal(weight.main_grad, expected.to(weight.main_grad.dtype))
        assert weight.grad is None, "autograd was given nothing"

    on_ranks(4, body)


@forked("features")
def test_what_a_copy_costs_is_the_same_on_every_rank(tmp_path):
    def body(rank):
        group = joined(rank, 2, tmp_path)
        costs = copies.measure_costs([torch.ones(64, 32), torch.ones(32, 64), torch.ones(32)], 16, group, group)
        told = [None, None]
        dist.all_gather_object(told, costs)
        assert told[0] == told[1] and all(each > 0 for each in costs)
        assert costs.break_even == costs.copy / (costs.products + costs.messages)

    on_ranks(2, body)
