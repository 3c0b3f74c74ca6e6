"""Exchanges of experts between ranks; when they move, go home and come back, at a measured price."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist

from mindspeed_lite.parallel.balance import copies, placement
from mindspeed_lite.parallel.balance.placer import PlacedExperts, PlacementGroup, Placer
from tests.harness.process_groups import joined
from tests.harness.processes import forked, on_ranks

EXPERTS, RANKS = 4, 2


class Layer(torch.nn.Module):
    """Two experts a rank, each with its number as its weight."""

    def __init__(self, rank, width=1):
        super().__init__()
        self.local_experts = torch.nn.ModuleList(torch.nn.Linear(width, 1, bias=False) for _ in range(2))
        for slot, each in enumerate(self.local_experts):
            torch.nn.init.constant_(each.weight, 2 * rank + slot)

    @property
    def numbers(self):
        return [int(each.weight.flatten()[0]) for each in self.local_experts]


class Placed(Placer):
    def __init__(self, interval, break_even=0.0, reason=""):
        super().__init__(interval, break_even)
        self.reason, self.said, self.moves = reason, [], 0

    def placement_group(self):
        return PlacementGroup(dist.group.WORLD, 1)

    def experts(self, layer):
        return layer.local_experts

    def why_not(self, layer):
        return self.reason

    def state_of(self):
        return lambda parameters: contextlib.nullcontext([*parameters])

    def has_moved(self):
        self.moves += 1

    def say(self, kind, text):
        self.said.append((kind, text))

    def step(self, layer, tokens):
        """One in which each expert has so many tokens on this rank."""
        if layer not in self.layers:
            self.layers[layer] = PlacedExperts(EXPERTS, dist.group.WORLD, torch.device("cpu"))
        for expert, each in enumerate(tokens):
            self.layers[layer].average.add(torch.nn.functional.one_hot(torch.full((each,), expert), EXPERTS).bool())
        self.end_step()


# Both hot experts are of rank 0; then 0 and 3 share a rank, and 2 and 1.
HOT, MOVED = [9, 7, 1, 1], {0: [2, 1], 1: [0, 3]}


@forked()
def test_experts_move_at_the_interval_and_come_home_and_back(tmp_path):
    def body(rank):
        joined(rank, RANKS, tmp_path)
        placer, layer = Placed(2), Layer(rank)
        home = layer.numbers
        placer.step(layer, HOT)
        assert layer.numbers == home and placer.moves == 0
        placer.step(layer, HOT)
        assert layer.numbers == MOVED[rank] and placer.away == [layer] and placer.moves == 1
        ((kind, text),) = placer.said
        assert kind == "move" and "step 2: 2 experts of 1 layers" in text and "1.778 before, 1.111 after" in text
        placer.go_home()
        assert layer.numbers == home and placer.away == []
        placer.step(layer, HOT)
        assert layer.numbers == MOVED[rank]
        # Two steps on, nothing is to be gained.
        placer.step(layer, HOT)
        assert layer.numbers == MOVED[rank] and placer.moves == 3

    on_ranks(RANKS, body)


@forked()
def test_experts_stay_where_a_move_does_not_pay_or_ranks_differ(tmp_path):
    def body(rank):
        joined(rank, RANKS, tmp_path)
        dear, layer = Placed(1, 1e9), Layer(rank)
        dear.step(layer, HOT)
        assert dear.moves == 0 and dear.said == []
        # A few tokens save less than a message costs.
        measured = Placed(1, None)
        measured.step(layer, HOT)
        ((kind, text),) = measured.said
        assert kind == "decision" and "tokens a step off the fullest rank" in text and measured.moves == 0
        for placer, own, reason in (
            (Placed(1), Layer(rank, 1 + rank), "experts of ranks differ in shape, or in what is trained"),
            (Placed(1, reason="they are grouped"), Layer(rank), "they are grouped"),
        ):
            placer.step(own, HOT)
            placer.step(own, HOT)
            assert placer.said == [("fallback", reason)] and placer.moves == 0

    on_ranks(RANKS, body)


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
            sent = layer.move(after, held, contextlib.nullcontext)
            assert sent == sum(30 + 7 + 120 + 4 for each in moves if each.to[rank] != rank)
            places = layer.experts_at
            for slot in range(2):
                for mine, expected in zip(held[slot], tensors_of(places[2 * rank + slot]), strict=True):
                    assert torch.equal(mine, expected)
            assert layer.by_place(columns)[0].tolist() == places and layer.is_home == (after == layer.home)

    on_ranks(3, body)


def test_a_move_must_save_what_it_sends():
    costs = copies.CopyCosts(copy=6.0, products=0.5, messages=9.0)
    # As many bytes as two copies, in 8 steps: 12 s against 4 s for each token.
    assert costs.break_even_of_move(2.0, 8) == 3.0
    assert copies.copied_bytes([torch.empty(3, dtype=torch.bfloat16), torch.empty(2)]) == 3 * 6 + 2 * 8
