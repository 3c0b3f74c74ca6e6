"""What the page of predicted times says: of trainings with a core for each rank, and of the others apart."""

from __future__ import annotations

import pytest

from benchmarks import predicted_time
from benchmarks.predicted_time import Pair
from mindspeed_lite.bench.calibration import probe
from mindspeed_lite.planner.step_time import StepTime

CALIBRATION = {
    "overheads": {"seconds": 1.0},
    "cores": 2,
    "device": "a processor",
    "versions": {"torch": "2"},
    "date": "today",
    "seconds": 1.0,
}


def pair(name: str, group: str, processes: int, predicted: float, measured: float) -> Pair:
    return Pair(name, group, processes, predicted, measured, {"products": predicted})


def test_one_calibration_predicts_and_the_others_are_said_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    case = predicted_time.CASES[0]
    rounds = [StepTime({"products": seconds, "host": seconds}, 0, 1) for seconds in (3.0, 1.0, 2.0)]
    found = predicted_time._pair(case, rounds, [9.0, 2.0, 4.0, 3.0])
    assert (found.predicted, found.measured, found.median, found.others) == (6.0, 3.0, 3.5, (2.0, 4.0))
    assert found.parts == {"products": 3.0, "host": 3.0}
    text = "\n".join(predicted_time.verdict([found], 2))
    assert "100.0% over 1 trainings" in text and "By each of the further calibrations alone: 33.3%, 33.3%." in text
    for wrong in (["--rounds", "0"], ["--turns", "0"]):
        with pytest.raises(SystemExit):
            predicted_time.main(wrong)
        assert "at least 1" in capsys.readouterr().err


def test_what_the_machine_does_is_told_apart_from_errors() -> None:
    short = {each for several in probe.whole(True).values() for each in several}
    runs, again = predicted_time.with_those_again(predicted_time.CASES, short)
    names = [*runs]
    assert set(again) == {1, 2} and sum(map(len, again.values())) == len(runs) - len(predicted_time.CASES)
    assert names[0] in again[1] and names.index(again[1][-1]) > names.index("experts")
    assert names.index(again[2][0]) < names.index("dp2") and names.index(again[2][-1]) > names.index("ep2")
    assert [*predicted_time.with_those_again(predicted_time.CASES[-1:], short)[0]] == ["dp4"]
    # A calibration without a script, or of one process.
    for known in ((), {each for each in short if each.ranks == 1}):
        assert 2 not in predicted_time.with_those_again(predicted_time.CASES, known)[1]
    ones = {each: runs[each] for each in again[1]}
    then = [{"words": [*each.words], "ranks": 1, "seconds": 2.0 + place} for place, each in enumerate(ones.values())]
    steps = {name: [4.0, 1.0 + place, 1.0 + place, 9.0] for place, name in enumerate(ones)}
    drift = predicted_time.drift(ones, {"trainings": then}, steps)
    assert drift == pytest.approx((1 / 2 + 2 / 3) / 2)
    both = [
        Pair("a", "", 1, 2.0, 1.0, {}, 1.0, (4.0,), (0.5, 0.5)),
        Pair("b", "", 2, 2.0, 1.0, {}, 1.0, (1.0,), (1.0, 2.0)),
    ]
    assert predicted_time.by_calibration(both) == [1.0, 1.5]
    assert predicted_time.by_calibration(both, True) == [0.5, 1.0]
    text = "\n".join(predicted_time.verdict(both, 2))
    assert "took 0.50 and 0.50 (1 rank), 1.00 and 2.00 (2 ranks) of what they took then" in text
    assert "with that counted, by each calibration: 50.0%, 100.0%." in text


def test_ranks_that_share_cores_are_judged_apart() -> None:
    pairs = [
        pair("a", "two processes", 2, 1.0, 1.1),
        pair("b", "two processes", 2, 2.0, 1.0),
        pair("c", "two processes", 2, 3.0, 0.9),
        pair("d", "four processes", 4, 1.0, 4.0),
    ]
    text = "\n".join(predicted_time.verdict(pairs, 2))
    assert "Mean error where every rank has a core: 114.1% over 3 trainings" in text and "+233.3% (c)" in text
    assert "Mean error where ranks share cores: 75.0% over 1 trainings" in text
    assert "Rank correlation where every rank has a core: -1.000." in text and "Rank correlation of all 4" in text
    assert "Of 3 layouts on two processes, the one predicted fastest is measured as number 3: NOT among" in text
    # One layout alone is no choice.
    assert "four processes" not in text
    page = predicted_time.page_of(pairs, CALIBRATION, "x.png", ["e: no figures: it ended"])
    assert "| d (share cores) | 4 |" in page and "core at that moment" in page and "- e: no figures" in page
    assert "share" not in predicted_time.page_of(pairs[:3], CALIBRATION, "x.png")
