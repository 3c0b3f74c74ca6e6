"""Off and on in turn until it is known which is faster: what is counted, and what is enough."""

from __future__ import annotations

import pytest

from mindspeed_lite.tuning.ab_test import PAIRS, WARMUP_STEPS, StepABTest

STEPS = WARMUP_STEPS + 2 * PAIRS


class Steps:
    """Steps that take `off` and `on` seconds, but for those that are given."""

    def __init__(self, off: float, on: float, but: dict[int, float] | None = None) -> None:
        self.now, self.reads, self.said = 0.0, 0, []  # type: ignore[var-annotated]
        self.turns = StepABTest(self._clock, self.said.append)
        self.was_on = []
        for number in range(STEPS + 5):
            self.turns.begin_step()
            self.was_on.append(self.turns.on)
            self.now += (but or {}).get(number, on if self.turns.on else off)

    def _clock(self) -> float:
        self.reads += 1
        return self.now


def test_steps_take_turns_and_then_the_faster_one_stays() -> None:
    steps = Steps(1.0, 0.9)
    assert steps.was_on[:STEPS] == [False, True] * (STEPS // 2)
    assert all(steps.was_on[STEPS:])
    assert steps.said == [
        f"stays on (1000.0 ms a step without, 900.0 ms with; faster in {PAIRS} of {PAIRS} pairs of steps)"
    ]
    assert steps.reads == STEPS + 1, "the clock waits for the device: not any more when it is known"


@pytest.mark.parametrize("on", [1.0, 0.998, 1.2])
def test_what_is_not_clearly_faster_is_off(on: float) -> None:
    steps = Steps(1.0, on)
    assert not any(steps.was_on[STEPS:]) and "is off from now on" in steps.said[0]


def test_first_steps_do_not_count_and_one_evaluation_decides_nothing() -> None:
    slow_start = dict.fromkeys(range(WARMUP_STEPS), 30.0)
    assert Steps(1.0, 0.9, {**slow_start, WARMUP_STEPS + 3: 60.0}).turns.on
    assert not Steps(1.0, 1.1, {WARMUP_STEPS + 2: 60.0}).turns.on


def test_two_pairs_that_it_loses_are_too_many() -> None:
    assert not Steps(1.0, 0.9, {WARMUP_STEPS + 1: 1.5, WARMUP_STEPS + 3: 1.5}).turns.on
