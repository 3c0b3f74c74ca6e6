"""The verdict and page of predicted times."""

from __future__ import annotations

from benchmarks import predicted_time
from benchmarks.predicted_time import Pair

CALIBRATION = {"cores": 2, "device": "a processor", "versions": {"torch": "2"}, "date": "today", "seconds": 1.0}


def test_trainings_whose_ranks_share_cores_are_judged_separately() -> None:
    pairs = [
        Pair(name, group, processes, predicted, measured, {"products": predicted})
        for name, group, processes, predicted, measured in (
            ("a", "two processes", 2, 1.0, 1.1),
            ("b", "two processes", 2, 2.0, 1.0),
            ("c", "two processes", 2, 3.0, 0.9),
            ("d", "four processes", 4, 1.0, 4.0),
        )
    ]
    text = "\n".join(predicted_time.verdict(pairs, 2))
    assert "Mean error where every rank has a core: 114.1% over 3 trainings" in text and "+233.3% (c)" in text
    assert "Mean error where ranks share cores: 75.0% over 1 trainings" in text
    assert "Of 3 layouts on two processes, the one predicted fastest is number 3 as measured." in text
    assert "four processes" not in text, "one layout alone is no choice"
    page = predicted_time.page_of(pairs, CALIBRATION)
    assert "| d (share cores) | 4 | 1000 ms | 4000 ms | -75.0% | products 100% |" in page
