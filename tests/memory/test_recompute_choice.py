"""What runs again is chosen as looking at everything would choose it, and a budget that is too small says the least."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest

from mindspeed_lite.memory import memory_options
from mindspeed_lite.memory import recompute_choice as choice
from mindspeed_lite.memory.layer_records import (
    ACTIVATION,
    ATTENTION,
    EXPERTS,
    INPUT_NORM,
    LAYER,
    MLP,
    MLP_NORM,
    NONE,
    SHARED,
    SHARED_ACTIVATION,
    Instant,
    LayerRecord,
    SavedStorage,
)
from mindspeed_lite.memory.memory_options import LayerOption, Transfers
from mindspeed_lite.memory.recompute_choice import BudgetError, StageRecord

pytest.importorskip("scipy")


@pytest.fixture(autouse=True)
def small_storages_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindspeed_lite.memory.offload.SMALLEST", 10)


PARTS = frozenset({INPUT_NORM, ATTENTION, MLP_NORM, ACTIVATION, MLP, LAYER})


def random_ways(draw: random.Random) -> list[LayerOption]:
    keep = LayerOption(frozenset(), draw.randint(50, 100), draw.randint(10, 40), 0, 0, 0.0)
    again = [
        LayerOption(
            frozenset({str(n)}), draw.randint(5, 60), 5, draw.randint(0, 30), draw.randint(0, 30), draw.random()
        )
        for n in range(3)
    ]
    return [keep, *again]


def record(**seconds: float) -> LayerRecord:
    saved = [
        SavedStorage(10, {INPUT_NORM}, enters=INPUT_NORM),
        SavedStorage(1, {INPUT_NORM}),
        SavedStorage(10, {ATTENTION}, leaves=INPUT_NORM),
        SavedStorage(50, {ATTENTION}),
        SavedStorage(10, {MLP_NORM}, enters=MLP_NORM),
        SavedStorage(10, {MLP}, leaves=MLP_NORM),
        SavedStorage(40, {ACTIVATION}, enters=ACTIVATION),
        SavedStorage(20, {MLP}, leaves=ACTIVATION),
    ]
    times = dict(input_norm=1.0, attention=10.0, mlp_norm=1.0, activation=2.0, mlp=20.0, layer=33.0) | seconds
    return LayerRecord(saved, {part: [value] for part, value in times.items()})


def test_the_bytes_of_each_way() -> None:
    found = {option.again: option for option in memory_options.layer_options(record(), PARTS)}
    assert found[frozenset()].kept == 151 and found[frozenset({LAYER})].kept == 10
    assert found[frozenset({INPUT_NORM})].kept == 140
    activation = found[frozenset({ACTIVATION})]
    assert (activation.kept, activation.back_late, activation.seconds) == (131, 20, 2.0)
    both = found[frozenset({ATTENTION, MLP})]
    assert (both.kept, both.back_late, both.back_early) == (41, 60, 50)
    # The MLP's own norm and what it keeps are gone while attention's backward pass runs; its input is not.
    assert found[frozenset()].kept_late == 70
    # What several layers save is not a layer's own.
    told = record()
    told.storages.append(SavedStorage(1000, {ATTENTION}, is_shared=True))
    assert {option.kept for option in memory_options.layer_options(told, frozenset())} == {151} and told.bytes == 151


def experts_record() -> LayerRecord:
    """Of experts and shared ones, whose input is that of the router and the exchange too."""
    saved = [
        SavedStorage(10, {MLP, SHARED}, enters=SHARED, leaves=MLP_NORM),
        SavedStorage(20, {MLP}),
        SavedStorage(30, {EXPERTS}, enters=EXPERTS),
        SavedStorage(40, {ACTIVATION}, enters=ACTIVATION),
        SavedStorage(50, {EXPERTS}, leaves=ACTIVATION),
        SavedStorage(60, {SHARED_ACTIVATION}, enters=SHARED_ACTIVATION),
        SavedStorage(70, {SHARED}, leaves=SHARED_ACTIVATION),
    ]
    times = {ACTIVATION: 1.0, EXPERTS: 8.0, SHARED_ACTIVATION: 1.5, SHARED: 5.0, MLP: 20.0}
    return LayerRecord(saved, {part: [value] for part, value in times.items()}, follower=1)


def test_experts_shared_experts_and_their_activations_are_ways_of_their_own() -> None:
    can = frozenset({ACTIVATION, EXPERTS, SHARED_ACTIVATION, SHARED, MLP})
    found = {option.again: option for option in memory_options.layer_options(experts_record(), can)}
    kept = {tuple(sorted(again)): option.kept for again, option in found.items()}
    assert kept == {
        (): 280, (ACTIVATION,): 230, (SHARED_ACTIVATION,): 210, (EXPERTS,): 190, (SHARED,): 150, (MLP,): 10,
        (ACTIVATION, SHARED_ACTIVATION): 160, (ACTIVATION, SHARED): 100, (EXPERTS, SHARED_ACTIVATION): 120,
        (EXPERTS, SHARED): 60,
    }  # fmt: skip
    assert found[frozenset({EXPERTS, SHARED})].seconds == 13.0 and found[frozenset({EXPERTS})].back_late == 90
    # What runs again inside of an MLP stays, so the rest of it does too.
    both = memory_options.layer_options(experts_record(), can, frozenset({MLP}))
    assert any(option.moved and option.again == {ACTIVATION} for option in both)
    assert not any(option.moved for option in both if option.again & {EXPERTS, SHARED})


def test_an_input_that_only_a_second_run_reads_is_kept_for_it() -> None:
    # A norm that keeps copies of its own and not what it was given.
    saved = [SavedStorage(10, set(), enters=INPUT_NORM), SavedStorage(24, {INPUT_NORM})]
    found = {
        option.again: option.kept
        for option in memory_options.layer_options(LayerRecord(saved, record().seconds), PARTS)
    }
    assert found[frozenset()] == 24 and found[frozenset({INPUT_NORM})] == 10


def test_a_way_that_another_beats_is_left_out() -> None:
    nothing_gained = LayerRecord([each for each in record().storages if INPUT_NORM not in each.parts], record().seconds)
    nothing_gained.storages = [each for each in nothing_gained.storages if each.leaves != INPUT_NORM]
    found = {option.again for option in memory_options.layer_options(nothing_gained, PARTS)}
    assert frozenset({INPUT_NORM}) not in found and frozenset({MLP_NORM}) in found


def test_ranks_of_a_stage_choose_for_the_fullest() -> None:
    fuller = LayerRecord([*record().storages, SavedStorage(7, {MLP})], {**record().seconds, MLP: [19.0]})
    one, two, at = frozenset({MLP}), frozenset({MLP, ATTENTION}), Instant(0, (1,))
    told = [
        StageRecord([PARTS], [record()], {at: 5}, [one], (3.0, 7.0)),
        StageRecord([PARTS - {LAYER}], [fuller], {at: 9, Instant(NONE, (2,)): 1}, [two], (4.0, 5.0)),
    ]
    found = choice.merged(told)
    assert found.can == [PARTS - {LAYER}] and found.layers[0].bytes == 158 and found.layers[0].cost(MLP) == 20.0
    assert found.moments == {at: 9, Instant(NONE, (2,)): 1}
    assert found.swappable == [one] and found.rates == (3.0, 5.0)
    # Where one rank has no room on its host, none of them moves anything.
    told[0].rates = None
    assert choice.merged(told).rates is None and choice.merged(told).transfers() is None


@pytest.mark.parametrize("moments", [{}, {Instant(0, (1,), is_forward=True): 7}], ids=["none", "forward alone"])
def test_a_stage_without_moments_that_count_runs_nothing_again(moments: dict[Instant, int]) -> None:
    keep, again = LayerOption(frozenset(), 9, 0, 0, 0, 0.0), LayerOption(frozenset({"x"}), 1, 0, 0, 0, 0.5)
    assert choice.choose([[keep, again]], moments, 100).options == (keep,)


def test_a_stage_without_layers() -> None:
    assert choice.choose([], {Instant(NONE, ()): 7}, 8).peak == 7
    with pytest.raises(BudgetError):
        choice.choose([], {Instant(NONE, ()): 7}, 6)
    assert "0.00 MiB at the peak; the budget" in choice.choose([], {}, 8).table(0, 8, 1, 2)


def test_a_search_that_ends_without_an_answer_leaves_what_takes_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scipy.optimize.milp", lambda *_, **__: SimpleNamespace(x=None))
    options, moments = [memory_options.layer_options(record(), PARTS)] * 3, {Instant(NONE, (1, 1, 1)): 4}
    found = choice.choose(options, moments, 420)
    assert found.peak <= 420 and found.gap == float("inf") and "may not be the least" in found.table(457, 420, 0, 1)
    with pytest.raises(BudgetError) as error:
        choice.choose(options, moments, found.peak - 1)
    assert error.value.least == found.peak


def moving_ways(draw: random.Random) -> list[LayerOption]:
    some = frozenset({"part"})
    moved = draw.randint(20, 60)
    return [
        *random_ways(draw),
        LayerOption(frozenset(), draw.randint(5, 30), 0, 0, 0, 0.0, some, moved),
        LayerOption(some, draw.randint(5, 20), 0, 9, 9, draw.random(), some, moved // 2),
    ]


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_best_of_all(seed: int, copies: bool) -> None:
    draw = random.Random(seed)
    options = [*((moving_ways if copies else random_ways)(draw) for _ in range(3)), random_ways(draw)]
    times = tuple(draw.random() for _ in range(4)), tuple(draw.random() for _ in range(4))
    rates = draw.choice([30.0, 100.0, 1e4]), draw.choice([30.0, 100.0, 1e4])
    lanes = Transfers((1, 2, 3, NONE), *times, *rates) if copies else None
    counts = [(1, 0, 0, 0), (1, 1, 0, 0), (1, 1, 1, 0), (1, 1, 1, 1)]
    moments = {Instant(layer, each, forward): 5 for layer, each in enumerate(counts) for forward in (True, False)}
    moments[Instant(NONE, counts[-1])] = draw.randint(0, 100)
    found = {each: choice.peak(each, moments, lanes) for each in itertools.product(*options)}
    least = min(found.values())
    budget = least + draw.randint(0, 120)
    exposed = {each: sum(lanes.exposed(each)) if lanes else 0.0 for each in found}
    seconds = {each: sum(option.seconds for option in each) + exposed[each] for each in found}
    best = min(seconds[each] for each, peak in found.items() if peak <= budget)
    chosen = choice.choose(options, moments, budget, lanes)
    assert chosen.peak == found[chosen.options] <= budget and chosen.seconds == pytest.approx(seconds[chosen.options])
    hidden = choice.HIDDEN_WEIGHT * sum(option.moved for option in chosen.options) * sum(1 / rate for rate in rates)
    assert chosen.seconds <= (best + hidden) * (1 + choice.GAP) + (0.02 if copies else 1e-9)
    with pytest.raises(BudgetError) as error:
        choice.choose(options, moments, least - 1, lanes)
    assert error.value.least == least


def test_a_copy_costs_what_the_next_layer_does_not_hide() -> None:
    move = LayerOption(frozenset(), 0, 0, 0, 0, 0.0, frozenset({MLP}), 100)
    again = LayerOption(frozenset({MLP}), 0, 0, 0, 0, 2.0)
    lanes = Transfers((1, NONE), (9.0, 4.0), (9.0, 5.0), out=20.0, back=10.0)
    # 5 s out overlap with 4 s; 10 s back with 5 s, and with 7 s where the layer computes its MLP again.
    assert lanes.exposed([move, LayerOption(frozenset(), 0, 0, 0, 0, 0.0)]) == (1.0 + 5.0, 0.0)
    assert lanes.exposed([move, again]) == (1.0 + 3.0, 0.0)
    # Leaving and coming back, they are there with those of the next layer, and in between they are not.
    moments = {
        Instant(0, (1, 0), True): 1,
        Instant(1, (1, 1), True): 2,
        Instant(1, (1, 1)): 3,
        Instant(NONE, (1, 1)): 50,
    }
    assert choice.peak([move, again], moments, lanes) == 103
    assert choice.peak([move, again], {Instant(NONE, (2, 2)): 50}, lanes) == 50


def test_what_moves_is_what_moved_parts_alone_save() -> None:
    told = record()
    told.follower = 1
    movable = frozenset({INPUT_NORM, ATTENTION, MLP_NORM, MLP})
    found = {(option.again, option.swapped): option for option in memory_options.layer_options(told, PARTS, movable)}
    nothing = frozenset[str]()
    both = found[nothing, frozenset({ATTENTION, MLP})]
    # Attention's own and its input; the MLP's input, what its activation starts from and what that gives.
    assert (both.moved, both.kept) == (60 + 70, 151 - 130)
    # What is released to be recomputed does not move, and neither does what that starts from.
    mixed = memory_options._option(told, frozenset({ACTIVATION}), frozenset({ATTENTION, MLP}))
    assert (mixed.moved, mixed.back_late, mixed.kept) == (60 + 10, 20, 61)
    # One byte is too small to be moved, and so is everything for a last layer, whose backward pass comes next.
    assert found[nothing, frozenset({INPUT_NORM, ATTENTION, MLP})].moved == 140
    told.follower = NONE
    assert not any(option.moved for option in memory_options.layer_options(told, PARTS, movable))
    # The caller holds the first layer's input.
    told.follower, told.is_first = 1, True
    assert max(option.moved for option in memory_options.layer_options(told, PARTS, movable)) == 140


def test_a_table_says_what_moves_and_why_nothing_does() -> None:
    move = LayerOption(frozenset({ACTIVATION}), 1 << 20, 0, 0, 0, 1e-3, frozenset({ATTENTION}), 3 << 20)
    lanes = Transfers((1, NONE), (1.0, 1.0), (1.0, 1.0), 2e9, 1e9)
    moments = {Instant(NONE, (1, 1)): 0}
    found = choice.choose([[move], [LayerOption(frozenset(), 1 << 20, 0, 0, 0, 0.0)]], moments, 4 << 20, lanes)
    text = found.table(8 << 20, 4 << 20, 0, 1, (2e9, 1e9))
    assert "3.00 MiB" in text and "activation; attention" in text
    assert "copies: 2.00 GB/s out, 1.00 GB/s back; 0.00 ms do not overlap with compute" in text
    assert "nothing is moved to the host: cpu has one memory" in found.table(0, 1, 0, 1, None, "cpu has one memory")
