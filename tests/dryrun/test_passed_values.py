"""Ranks of a dry run that wait for each other's values."""

from __future__ import annotations

import pytest

from mindspeed_lite.dryrun.passed_values import PassedValues


@pytest.mark.parametrize("goes_on", [False, True])
def test_only_ranks_that_stay_are_a_circle(tmp_path, goes_on):
    one, other = (PassedValues(tmp_path, rank, {0, 1}) for rank in (0, 1))
    waits, reads = one._waits, []

    def read(rank):
        reads.append(rank)
        other._write(waits(1), (0, f"value {len(reads) if goes_on else 0}"))
        return waits(rank)

    one._waits = read
    assert one._is_circle(1) is not goes_on


def test_an_example_stands_for_what_no_rank_sends(tmp_path):
    one, other, third = (PassedValues(tmp_path, rank, {0, 1, 2}) for rank in range(3))
    third.end()
    # Two that wait for one do not wait for each other.
    other._write(other._waits(1), (1, "example-3"))
    assert one.example(3) is None
    other.put_example(3, [64, 2, 128])
    third.put_example(3, [1, 1, 1])
    assert one.example(3) == [64, 2, 128] and not one._waits(0).exists()
