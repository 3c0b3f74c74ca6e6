"""What runs again is chosen as looking at everything would choose it, and a budget that is too small says the least."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest

from mindspeed_lite.memory import recompute_choice as choice
from mindspeed_lite.memory.layer_records import (
    ACTIVATION,
    ATTENTION,
    INPUT_NORM,
    LAYER,
    MLP,
    MLP_NORM,
    LayerRecord,
    SavedStorage,
)
from mindspeed_lite.memory.recompute_choice import BudgetError, Way
from mindspeed_lite.memory.recompute_table import table

pytest.importorskip("scipy")
PARTS = frozenset({INPUT_NORM, ATTENTION, MLP_NORM, ACTIVATION, MLP, LAYER})


def random_ways(draw: random.Random) -> list[Way]:
    keep = Way(frozenset(), draw.randint(50, 100), draw.randint(10, 40), 0, 0, 0.0)
    again = [
        Way(frozenset({str(n)}), draw.randint(5, 60), 5, draw.randint(0, 30), draw.randint(0, 30), draw.random())
        for n in range(3)
    ]
    return [keep, *again]


@pytest.mark.parametrize("seed", range(12))
def test_it_is_the_best_of_all(seed: int) -> None:
    draw = random.Random(seed)
    options = [random_ways(draw) for _ in range(4)]
    moments = {(-1, (1, 1, 1, 1)): draw.randint(0, 50), (3, (2, 1, 1, 1)): 3, (0, (1, 0, 0, 0)): draw.randint(0, 300)}
    peaks = {each: choice.peak(each, moments) for each in itertools.product(*options)}
    least = min(peaks.values())
    budget = least + draw.randint(0, 150)
    best = min(sum(way.seconds for way in each) for each, peak in peaks.items() if peak <= budget)
    found = choice.choose(options, moments, budget)
    assert found.peak == choice.peak(found.ways, moments) <= budget
    assert found.seconds <= best * (1 + choice.GAP) + 1e-9 and found.gap <= choice.GAP
    with pytest.raises(BudgetError) as error:
        choice.choose(options, moments, least - 1)
    assert error.value.least == least


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
    found = {way.again: way for way in choice.ways(record(), PARTS)}
    assert found[frozenset()].kept == 151 and found[frozenset({LAYER})].kept == 10
    assert found[frozenset({INPUT_NORM})].kept == 140
    activation = found[frozenset({ACTIVATION})]
    assert (activation.kept, activation.back_late, activation.seconds) == (131, 20, 2.0)
    both = found[frozenset({ATTENTION, MLP})]
    assert (both.kept, both.back_late, both.back_early) == (41, 60, 50)
    # The MLP's own norm and what it keeps are gone while attention's backward pass runs; its input is not.
    assert found[frozenset()].kept_late == 70


def test_an_input_that_only_a_second_run_reads_is_kept_for_it() -> None:
    # A norm that keeps copies of its own and not what it was given.
    saved = [SavedStorage(10, set(), enters=INPUT_NORM), SavedStorage(24, {INPUT_NORM})]
    found = {way.again: way.kept for way in choice.ways(LayerRecord(saved, record().seconds), PARTS)}
    assert found[frozenset()] == 24 and found[frozenset({INPUT_NORM})] == 10


def test_a_way_that_another_beats_is_left_out() -> None:
    nothing_gained = LayerRecord([each for each in record().storages if INPUT_NORM not in each.parts], record().seconds)
    nothing_gained.storages = [each for each in nothing_gained.storages if each.leaves != INPUT_NORM]
    found = {way.again for way in choice.ways(nothing_gained, PARTS)}
    assert frozenset({INPUT_NORM}) not in found and frozenset({MLP_NORM}) in found


def test_ranks_of_a_stage_choose_for_the_fullest() -> None:
    fuller = LayerRecord([*record().storages, SavedStorage(7, {MLP})], {**record().seconds, MLP: [19.0]})
    told = [([PARTS], [record()], {(0, (1,)): 5}), ([PARTS - {LAYER}], [fuller], {(0, (1,)): 9, (-1, (2,)): 1})]
    can, records, moments = choice.merged(told)
    assert can == [PARTS - {LAYER}] and records[0].bytes == 158 and records[0].cost(MLP) == 20.0
    assert moments == {(0, (1,)): 9, (-1, (2,)): 1}


def test_a_table_says_what_runs_again() -> None:
    options = [choice.ways(record(), PARTS)] * 3
    moments = {(-1, (1, 1, 1)): 4}
    text = table(choice.choose(options, moments, 420), 457, 420, 1, 2)
    assert "of pipeline stage 1" in text and "activation" in text and "the budget is 0.00 MiB" in text


def test_a_stage_without_layers() -> None:
    assert choice.choose([], {(-1, ()): 7}, 8).peak == 7
    with pytest.raises(BudgetError):
        choice.choose([], {(-1, ()): 7}, 6)
    assert "0.00 MiB at the peak; the budget" in table(choice.choose([], {}, 8), 0, 8, 1, 2)


def test_a_search_that_ends_without_an_answer_leaves_what_takes_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scipy.optimize.milp", lambda *_, **__: SimpleNamespace(x=None))
    options, moments = [choice.ways(record(), PARTS)] * 3, {(-1, (1, 1, 1)): 4}
    found = choice.choose(options, moments, 420)
    assert found.peak <= 420 and found.gap == float("inf") and "may not be the least" in table(found, 457, 420, 0, 1)
    with pytest.raises(BudgetError) as error:
        choice.choose(options, moments, found.peak - 1)
    assert error.value.least == found.peak
