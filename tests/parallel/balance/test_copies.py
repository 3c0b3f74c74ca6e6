"""Copies of experts: outputs and every gradient against one process in float64, and what ranks then compute."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mindspeed_lite.parallel.balance import copies, placement
from mindspeed_lite.parallel.balance.copies import Slots
from mindspeed_lite.parallel.balance.placement import SentTokens, hot_experts, loads_with_copies
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
            placed, sent = placement.contiguous(problem.experts, 4), SentTokens.counted(counts)
            copied = hot_experts(sent, placed, 3)
            found = run(problem, rank, group, copied, "autograd")
            assert found["rows"].item() == loads_with_copies(sent, placed, copied)[rank]

    on_ranks(4, body)


def _dropped(monkeypatch):
    """What copies found never reaches the owner's main gradient."""
    monkeypatch.setattr(copies.PendingGradients, "put", lambda self, works, sums: [work.wait() for work in works])


def _other_owner(monkeypatch):
    own = copies.CopyPlan.reduce
    monkeypatch.setattr(
        copies.CopyPlan,
        "reduce",
        lambda self, flat: own(self._replace(owners=[(o + 1) % 4 for o in self.owners]), flat),
    )


def _other_parameter(monkeypatch):
    """The sums of an owner's experts change places."""
    own = copies.PendingGradients.put

    def put(self, works, sums):
        mains, found = [main for main, _ in sums], [each for _, each in sums]
        half = len(found) // 2
        own(self, works, list(zip(mains, found[half:] + found[:half], strict=True)) if half > 1 else sums)

    monkeypatch.setattr(copies.PendingGradients, "put", put)


def _owner_sends_away(monkeypatch):
    """Tokens of the owner go to its slot as well."""
    own = Slots.open

    def is_open(self, rank):
        found, each = own(self, rank), self.local + len(self.copied)
        return [is_open or (at // each == rank and at % each >= self.local) for at, is_open in enumerate(found)]

    monkeypatch.setattr(Slots, "open", is_open)


MUTATIONS = (_dropped, _other_owner, _other_parameter, _owner_sends_away)


@forked("features")
@pytest.mark.parametrize("mutation", [each.__name__ for each in MUTATIONS])
def test_a_wrong_copy_is_noticed(tmp_path, mutation):
    def body(rank):
        group = joined(rank, 4, tmp_path)
        problem, copied = Problem(4, 8, (9, 3, 5, 7), 3), (0, 1, 5)
        with pytest.MonkeyPatch.context() as monkeypatch:
            globals()[mutation](monkeypatch)
            found = run(problem, rank, group, copied, "main")
        everywhere = torch.tensor([len(wrong(found, definition(problem), rank))])
        dist.all_reduce(everywhere)
        assert everywhere.item() > 0

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
