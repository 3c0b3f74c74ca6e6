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
