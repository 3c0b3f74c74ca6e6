"""What is called the same training, and what is not."""

from __future__ import annotations

import math

import pytest

from mindspeed_lite.bench.judge import compare_losses, widest

BASE = [5.0, 4.5, 4.0, 3.5]


def steps(losses, norms=None):
    return [
        {
            "iteration": index + 1,
            "measured": True,
            "loss": {} if loss is None else {"lm loss": loss},
            "grad_norm": (norms or [1.0] * len(losses))[index],
        }
        for index, loss in enumerate(losses)
    ]


def moved(by):
    return steps([loss + by * (index + 1) for index, loss in enumerate(BASE)])


def judge(on, numerics, rounding_baseline=None, off=None):
    return compare_losses([steps(BASE)] if off is None else off, [on], numerics, rounding_baseline)


def test_the_same_bits_are_identical_in_every_class():
    for numerics in ("bitwise", "ulp", "deviation"):
        assert judge(steps(BASE), numerics)["verdict"] == "identical"


def test_bitwise_forgives_nothing():
    found = judge(moved(1e-12), "bitwise")
    assert found["verdict"] == "differs" and "promise the same bits" in found["reason"]
    found = judge(steps(BASE, norms=[1.0, 1.0, 1.0 + 1e-7, 1.0]), "bitwise")
    assert found["verdict"] == "differs" and "gradient norms" in found["reason"]


def test_bitwise_cannot_be_asked_of_an_off_that_differs_from_itself():
    found = judge(moved(1e-3), "bitwise", off=[steps(BASE), moved(1e-4)])
    assert found["verdict"] == "not judged" and "off differs from itself" in found["reason"]


def test_the_curves_are_those_of_the_repeat_that_the_words_are_about():
    longer = [*BASE, 3.0]
    found = compare_losses([steps(BASE), steps(longer)], [moved(1e-5), steps([*BASE, 3.5])], "bitwise", None)
    assert found["step"] == 5 and "at iteration 5" in found["reason"]
    (row,) = [row for row in found["series"] if row["iteration"] == found["step"]]
    assert row["on"] - row["off"] == found["largest_difference"] == 0.5


@pytest.mark.parametrize(("by", "verdict"), [(1e-4, "agrees"), (1.9e-3, "agrees"), (2.1e-3, "differs")])
def test_ulp_is_held_against_the_rounding_baseline(by, verdict):
    found = judge(moved(by), "ulp", ("itself in float32", moved(1e-3)))
    assert found["verdict"] == verdict
    assert found["times_rounding_baseline"] == pytest.approx(by / 1e-3, rel=1e-6)
    assert found["largest_difference"] == pytest.approx(4 * by) and found["step"] == 4


def test_without_a_rounding_baseline_nothing_is_claimed():
    assert judge(moved(1e-4), "ulp")["verdict"] == "not judged"


def test_documented_deviation_is_not_a_failure_but_nan_is():
    assert judge(moved(1.0), "deviation")["verdict"] == "documented deviation"
    for losses in ([5.0, math.nan, 4.0, 3.5], [5.0, None, 4.0, 3.5]):
        found = judge(steps(losses), "deviation")
        assert found["verdict"] == "differs" and found["step"] == 2
    both = steps([5.0, math.nan, 4.0, 3.5])
    assert judge(both, "bitwise", off=[both])["verdict"] == "identical"


def test_the_worst_of_all_repeats_counts():
    found = compare_losses([steps(BASE)] * 2, [steps(BASE), moved(1.0)], "bitwise", None)
    assert found["verdict"] == "differs" and found["largest_difference"] == 4.0


def test_features_together_have_the_widest_class():
    assert (
        widest(["ulp", "bitwise"]) == "ulp" and widest([]) == "bitwise" and widest(["deviation", "ulp"]) == "deviation"
    )
