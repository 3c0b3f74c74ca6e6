"""Exchanges of experts between ranks, the averages they follow from, and what an exchange must save."""

from __future__ import annotations

import contextlib

import pytest
import torch

from mindspeed_lite.parallel.balance import payoff, placement
from mindspeed_lite.parallel.balance.load_average import LoadAverage, alike, predicted
from mindspeed_lite.parallel.balance.placed_experts import PlacedExperts
from tests.harness.process_groups import joined
from tests.harness.processes import forked, on_ranks


def tensors_of(expert):
    """Odd sizes and several dtypes: bytes of one end where no wider element of the next could begin."""
    generator = torch.Generator().manual_seed(expert)
    return [
        torch.randn(3, 5, generator=generator).to(torch.bfloat16),
        torch.randint(0, 255, (7,), generator=generator, dtype=torch.uint8),
        torch.randn(3, 5, generator=generator, dtype=torch.float64),
        torch.randn(1, generator=generator),
        torch.empty(0),
    ]


@forked()
def test_a_rank_has_the_tensors_of_the_experts_in_its_places(tmp_path):
    def body(rank):
        joined(rank, 3, tmp_path)
        group = torch.distributed.group.WORLD
        layer = PlacedExperts(6, group, torch.device("cpu"))
        # Two experts a rank.
        held = [tensors_of(2 * rank), tensors_of(2 * rank + 1)]
        columns = torch.arange(6.0).repeat(4, 1)
        assert layer.by_place(columns) is columns
        # Slot 0 goes round; in slot 1 two change places and one stays; then all go home.
        for after in ([1, 0, 2, 2, 0, 1], [2, 1, 1, 0, 0, 2], layer.home):
            before = layer.placement
            moves = placement.slot_moves(after, before, 3)
            sent = layer.move(after, lambda slot: contextlib.nullcontext(held[slot]))
            assert sent == sum(30 + 7 + 120 + 4 for each in moves if each.to[rank] != rank)
            places = layer.experts_at
            for slot in range(2):
                for mine, expected in zip(held[slot], tensors_of(places[2 * rank + slot]), strict=True):
                    assert torch.equal(mine, expected)
            assert layer.by_place(columns)[0].tolist() == places and layer.is_home == (after == layer.home)

        average = LoadAverage(3, torch.device("cpu"), decay=0.5)
        average.add(torch.tensor([[True, False, rank == 0]]))
        average.end_step()
        assert predicted([average], group) == [[3.0, 0.0, 1.0]]
        average.end_step()
        # (0.5 * 0 + 0.25 * 1) / 0.75
        assert predicted([average], group)[0][0] == pytest.approx(1.0, abs=3 / 1024)
        assert alike([5, rank], group, torch.device("cpu")) == [True, False]

    on_ranks(3, body)


def test_a_move_must_save_what_it_sends():
    costs = payoff.CopyCosts(copy=6.0, products=0.5, messages=9.0)
    # As many bytes as two copies, in 8 steps: 12 s against 4 s for each token.
    assert costs.break_even_of_move(2.0, 8) == 3.0
    assert payoff.copied_bytes([torch.empty(3, dtype=torch.bfloat16), torch.empty(2)]) == 3 * 6 + 2 * 8
