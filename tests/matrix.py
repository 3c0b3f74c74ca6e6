"""Which part of a matrix of tests `make test` runs, and which only `make test-whole`.

Twenty minutes on two cores do not hold every layout on every release. The newest release runs all; of the older ones
each takes the columns that come to it in turn, so that every column runs on one of them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests import releases

whole = pytest.mark.whole


def of_releases(columns: Sequence[Any], among: Sequence[str] = releases.ALL) -> list[Any]:
    """Parameters (release, column) for all pairs, those left to the whole run marked."""
    *older, newest = among
    return [
        pytest.param(release, column, marks=() if release == newest or older[place % len(older)] == release else whole)
        for release in among
        for place, column in enumerate(columns)
    ]


def only(kept: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Parameters for all values; those not `kept` are left to the whole run."""
    return [pytest.param(value, marks=() if value in kept else whole) for value in values]
