"""The comparison reads Megatron's log as it is, and finds what is wrong when something is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from demo import compare
from demo.compare import Run, judge, largest_difference, parse_log, why_not_falling

FALLING = tuple(5.5 - 0.06 * step for step in range(50))


def line(step: int, time: float, loss: str | None) -> str:
    told = f"lm loss: {loss} | " if loss is not None else ""
    return (
        f" [2026-01-01 00:00:00.000000] iteration {step:8d}/      50 | consumed samples: {step:12d} | "
        f"elapsed time per iteration (ms): {time:.1f} | learning rate: 6.000000E-04 | batch size: 1 | {told}"
        "loss scale: 1.0 | grad norm: 22.078 | number of skipped iterations:   0 |"
    )


def log(losses: Sequence[float], time: float = 100.0) -> str:
    memory = "[Rank 0] (after 1 iterations) memory (MB) | reserved: 1.00 | max allocated: {}"
    lines = [line(step, time + step, f"{loss:.6E}") for step, loss in enumerate(losses, 1)]
    peaks = [memory.format(812.5), memory.format(640.25)]
    return "\n".join(["noise", lines[0], *peaks, *lines[1:], "more noise"])


def run(losses: Sequence[float] = FALLING, time: float = 100.0, memory: float = 1000.0) -> Run:
    return Run(tuple(losses), (time * 50, *[time] * (len(losses) - 1)), memory)


def test_a_log_gives_every_loss_every_time_and_the_largest_memory() -> None:
    found = parse_log(log(FALLING), 50)
    assert found.losses == pytest.approx(FALLING, abs=1e-6)
    assert found.times == tuple(100.0 + step for step in range(1, 51))
    assert found.memory == 812.5
    assert parse_log(log(FALLING), 50, memory=7.0).memory == 7.0


def test_a_step_that_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="the log has 50 of 60 steps, and step 51 is missing"):
        parse_log(log(FALLING), 60)
    with pytest.raises(ValueError, match="0 of 1 steps"):
        parse_log("", 1)


def test_a_step_without_a_number_for_a_loss_is_not_a_number() -> None:
    losses = parse_log("\n".join([line(1, 10, "5.5E+00"), line(2, 10, None), line(3, 10, "NAN")]), 3).losses
    assert losses[0] == 5.5
    assert math.isnan(losses[1]) and math.isnan(losses[2])


def test_the_time_of_a_step_leaves_the_warm_up_out() -> None:
    assert run(time=100.0).step_time == 100.0


def test_runs_that_fall_and_agree_pass() -> None:
    near = [loss + 1e-4 for loss in FALLING]
    verdict = judge([run(), run()], [run(near), run()], tolerance=0.01)
    assert verdict.problems == ()
    assert verdict.difference == pytest.approx(1e-4)


@pytest.mark.parametrize("at", [0, 31, 49])
@pytest.mark.parametrize("round_number", [0, 1])
def test_one_loss_that_differs_is_found_with_its_step(at: int, round_number: int) -> None:
    planted = [loss + 0.02 * (step == at) for step, loss in enumerate(FALLING)]
    on = [run(), run()]
    on[round_number] = run(planted)
    verdict = judge([run(), run()], on, tolerance=0.01)
    assert verdict.step == at + 1
    assert verdict.problems == (f"off and on disagree by 0.02 in the loss at step {at + 1}; 0.01 is allowed",)


def test_a_loss_that_does_not_fall_is_found_in_the_run_it_is_in() -> None:
    flat = [5.5 - 0.01 * step for step in range(50)]
    verdict = judge([run(flat)], [run(flat)], tolerance=0.01)
    assert [problem.partition(":")[0] for problem in verdict.problems] == [
        "features off, round 1",
        "features on, round 1",
    ]
    assert "went from 5.500 to" in verdict.problems[0]


def test_a_loss_that_falls_and_rises_again_does_not_fall() -> None:
    assert why_not_falling([*FALLING, *[5.4] * 10]) is not None
    assert why_not_falling(FALLING) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_neither_falling_nor_in_agreement(bad: float) -> None:
    broken = [*FALLING[:9], bad, *FALLING[10:]]
    assert why_not_falling(broken) == "the loss of step 10 is not a number"
    assert largest_difference(FALLING, broken) == (math.inf, 10)
    assert largest_difference(broken, broken) == (math.inf, 10)
    assert len(judge([run()], [run(broken)], tolerance=0.01).problems) == 2


def test_ratios_are_those_of_each_round() -> None:
    assert compare.ratios([run(time=200), run(time=330)], [run(time=100), run(time=110)]) == [2.0, 3.0]


def test_the_tables_have_the_first_and_the_last_step_and_the_ratios() -> None:
    table = compare.loss_table(run(), run())
    steps = [row.split()[0] for row in table]
    assert steps == ["step", "1", "2-8", "9-17", "18-25", "26-33", "34-42", "43-50"]
    assert len({len(row) for row in table}) == 1
    on = [run(time=100), run(time=100, memory=500)]
    text = "\n".join(compare.speed_table([run(time=200), run(time=300)], on))
    assert "A step with features on is 2.50x as fast (2.00 to 3.00 over 2 rounds)." in text
    assert "1000 MB     1000 MB    1.00 of it" in text
    assert "200 ms      100 ms    2.00x as fast" in text
    assert "busy" not in text
    assert "one round" in "\n".join(compare.speed_table([run()], [run()]))


def test_a_machine_that_was_busy_is_told_and_the_undisturbed_ratio_stands_beside_it() -> None:
    disturbed = Run(FALLING, tuple(200.0 if step % 3 == 0 else 900.0 for step in range(50)), 1000.0)
    lines = compare.speed_table([disturbed], [run(time=100)])
    assert lines[2].split()[-1] == "2.00x"
    assert lines[-1].endswith("Undisturbed, a step with features on is 2.00x as fast.")
    assert "9.00x" in lines[1]


def test_every_precision_has_a_tolerance_below_what_training_gains() -> None:
    assert set(compare.TOLERANCE) == {"fp32", "bf16"}
    assert max(compare.TOLERANCE.values()) < (1 - compare.FALL) / 10 * 5.5
