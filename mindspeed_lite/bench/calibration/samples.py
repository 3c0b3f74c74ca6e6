"""What repeated times of the same work say of a machine that other work disturbs now and then."""

from __future__ import annotations

from collections.abc import Sequence


def undisturbed(seconds: Sequence[float]) -> float:
    """The lower quartile: a disturbance only adds, and lasts shorter than three quarters of a measurement."""
    return sorted(seconds)[len(seconds) // 4]
