"""Which part of a matrix of tests `make test` runs, and which only `make test-whole`.

Fifteen minutes on two cores do not hold every layout on every release. The newest release runs most; the older ones run
what differs between releases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.harness import checkouts

whole = pytest.mark.whole


def only(kept: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Parameters for all values, of which a tuple stands for several; those not `kept` are left to the whole run."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=() if value in kept else whole)
        for value in values
    ]


def pairs(columns: Sequence[Any], older: Sequence[tuple[str, Any]]) -> list[Any]:
    """Parameters (release, column) for all pairs: on the newest release all run, of the others `older`."""
    kept = [*older, *((checkouts.ALL[-1], column) for column in columns)]
    return only(kept, [(release, column) for release in checkouts.ALL for column in columns])
