"""Placement and copies of experts against exact answers, and the simulation against a count by hand."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_lite.parallel.balance import placement
from mindspeed_lite.parallel.balance.placement import hot_experts, loads_with_copies
from mindspeed_lite.parallel.balance.record import LoadHeader, LoadRecord, LoadStep
from mindspeed_lite.parallel.balance.simulation import simulate

EVEN_SIZES = st.sampled_from([(4, 2), (6, 3), (8, 2), (8, 4), (12, 3)])


def largest(loads, placed, ranks):
    return max(placement.rank_loads(loads, placed, ranks))


def exact(loads, ranks):
    """The least largest sum of all orders of each slot."""
    local = len(loads) // ranks
    return min(
        largest(loads, [orders[each % local][each // local] for each in range(len(loads))], ranks)
        for orders in itertools.product(itertools.permutations(range(ranks)), repeat=local)
    )


@settings(max_examples=60)
@given(st.sampled_from([(4, 2), (6, 3), (8, 2), (6, 2)]), st.integers(0, 2**32))
def test_an_improved_placement_is_near_the_exact_one(sizes, seed):
    experts, ranks = sizes
    chance = random.Random(seed)
    loads, local = [chance.expovariate(1) for _ in range(experts)], experts // ranks
    home = placement.contiguous(experts, ranks)
    placed = placement.improved(loads, home, ranks, [each % local for each in range(experts)])
    assert sorted(placed) == home
    best, found = exact(loads, ranks), largest(loads, placed, ranks)
    assert best <= found * (1 + 1e-12) and found <= largest(loads, home, ranks)
    assert found <= 1.25 * best


@settings(max_examples=60)
@given(EVEN_SIZES, st.integers(0, 2**32))
def test_a_chosen_placement_keeps_slots_and_pays(sizes, seed):
    experts, ranks = sizes
    chance = random.Random(seed)
    local = experts // ranks
    loads = [chance.expovariate(1) for _ in range(experts)]
    before = placement.chosen([chance.random() for _ in loads], placement.contiguous(experts, ranks), ranks)
    price = chance.random() / 4
    after = placement.chosen(loads, before, ranks, price)
    moves = placement.slot_moves(after, before, ranks)
    places = placement.experts_at(after, ranks)
    assert sorted(places) == [*range(experts)]
    for place, expert in enumerate(places):
        assert place % local == expert % local and after[expert] == place // local
    for each in moves:
        for rank in range(ranks):
            assert each.source[each.to[rank]] == rank
    gain = largest(loads, before, ranks) - largest(loads, after, ranks)
    assert gain >= price * len(moves) and bool(moves) == (after != before)
    assert placement.chosen(loads, before, ranks, 1e9) == before


def test_what_cannot_be_placed_is_refused():
    with pytest.raises(ValueError, match="3 ranks cannot hold 8 experts"):
        placement.contiguous(8, 3)


def test_a_copied_expert_is_computed_where_its_tokens_come_from():
    # [sources][experts]; experts 0 and 1 on rank 0, 2 and 3 on rank 1.
    sent = [[6, 1, 0, 1], [2, 0, 3, 0]]
    placed = [0, 0, 1, 1]
    assert loads_with_copies(sent, placed, ()) == [9, 4]
    assert loads_with_copies(sent, placed, (0,)) == [1 + 6, 4 + 2]
    assert hot_experts(sent, placed, 1) == [0]
    # With expert 0 copied 7 stand against 6; copying another of the fullest rank moves nothing away from its source.
    assert hot_experts(sent, placed, 3) == [0]
    assert hot_experts([[0.5] * 4] * 2, placed, 2) == []


@settings(max_examples=60)
@given(st.randoms(use_true_random=False), st.integers(0, 4))
def test_copies_keep_every_token_and_never_raise_the_fullest(chance, number):
    ranks, experts = 4, 8
    counts = [[chance.randrange(20) for _ in range(experts)] for _ in range(ranks)]
    sent, placed = counts, placement.contiguous(experts, ranks)
    hot = hot_experts(sent, placed, number)
    before, after = (loads_with_copies(sent, placed, each) for each in ((), hot))
    by_hand = [
        sum(
            counts[source][expert]
            for source in range(ranks)
            for expert in range(experts)
            if (source if expert in hot else placed[expert]) == rank
        )
        for rank in range(ranks)
    ]
    assert after == by_hand and sum(after) == sum(before) and len(hot) <= number and max(after) <= max(before)


def test_two_equally_full_ranks_need_two_copies():
    # A copy of one alone leaves the other rank as full as it was.
    sent = [[3, 0, 3, 0, 0.5, 0.5, 0.5, 0.5]] * 4
    placed = placement.contiguous(8, 4)
    assert hot_experts(sent, placed, 1) == []
    assert hot_experts(sent, placed, 2) == [0, 2] and max(loads_with_copies(sent, placed, [0, 2])) == 10
    # Two tokens are gained by two copies.
    assert hot_experts(sent, placed, 2, price=0.9) == [0, 2] and hot_experts(sent, placed, 2, price=1.0) == []


def record_of(rows, ranks=2):
    header = LoadHeader(len(rows[0]), 1, ranks, 1, 1, (1,))
    steps = [LoadStep(at, [sum(row)], [row], [[0] * ranks]) for at, row in enumerate(rows, 1)]
    return LoadRecord(header, tuple(steps))


def test_policies_by_hand():
    # Experts 0 and 1 on rank 0. From the second step on, the first is known to a placement.
    rows = [[8, 4, 2, 2], [8, 4, 2, 2]]
    outcomes = {each.name: each for each in simulate(record_of(rows), 2, copies=1, interval=1)}
    assert outcomes["none"].by_step == [1.5, 1.5] and outcomes["none"].imbalance == 1.5
    # A copy of expert 0: 4 + 4 against 4 + 4.
    assert outcomes["copies"].by_step == [1.0, 1.0] and outcomes["copies"].copied == 2
    assert outcomes["copies"].stayed == 8
    # Expert 1 changes places with one of rank 1's: 10 against 6.
    assert outcomes["placement"].by_step == [1.5, 1.25] and outcomes["placement"].moved == 2
    # With 6 of expert 0 and another on one rank and 10 on the other, a copy of the heaviest lowers nothing.
    assert outcomes["both"].by_step == [1.0, 1.25] and outcomes["both"].copied == 1


def test_a_placement_does_not_see_the_step_it_is_judged_on():
    # The hot expert changes its rank in every step: the past misleads.
    rows = [[8, 0, 0, 0], [0, 0, 8, 0]] * 4
    outcomes = {each.name: each for each in simulate(record_of(rows), 2, copies=1, interval=1)}
    assert outcomes["placement"].imbalance == 2.0 and outcomes["copies"].imbalance == 1.0
