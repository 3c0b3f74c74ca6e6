"""Intervals hold what they promise."""

from __future__ import annotations

import math
import random

import pytest

from mindspeed_lite.bench.statistics import TOO_FEW, paired_ratio, spread


def test_nothing_against_nothing_is_one_nine_times_in_ten() -> None:
    """Two arms that are the same: 1 lies inside the 95 % interval in about 95 of 100 benchmarks of few pairs."""
    rng = random.Random(7)
    for repeats in (2, 3, 5):
        held = 0
        for _ in range(2000):
            drift = rng.gauss(0, 0.2)
            off, on = ([math.exp(drift * i + rng.gauss(0, 0.03)) for i in range(repeats)] for _ in range(2))
            found = paired_ratio(off, on)
            assert found is not None
            held += found.verdict("faster", "slower") in ("inside the noise", TOO_FEW)
        assert 0.93 < held / 2000 < 0.97, repeats


def test_a_real_difference_is_found_under_noise() -> None:
    rng = random.Random(8)
    off, on = ([scale * math.exp(rng.gauss(0, 0.02)) for _ in range(5)] for scale in (1.2, 1.0))
    found, back = paired_ratio(off, on), paired_ratio(on, off)
    assert found is not None and back is not None and found.ratio == pytest.approx(1.2, rel=0.05)
    assert (found.verdict("faster", "slower"), back.verdict("faster", "slower")) == ("faster", "slower")


def test_what_drifts_cancels() -> None:
    off = [1.0, 2.0, 4.0]
    found = paired_ratio(off, [value / 1.1 for value in off])
    assert found is not None and found.low == pytest.approx(1.1) and found.high == pytest.approx(1.1)


def test_one_pair_has_no_interval_and_none_no_ratio() -> None:
    found = paired_ratio([2.0], [1.0])
    assert found is not None and found.ratio == 2.0 and found.low is None
    assert found.verdict("faster", "slower") == "one pair: no interval"
    assert paired_ratio([], []) is None


def test_the_spread_is_between_the_10_and_90_per_cent_quantiles() -> None:
    assert spread([2, 1]) == pytest.approx((1.1, 1.9)) and spread([4.0]) == (4.0, 4.0)
