"""Ratios of paired measurements, with confidence interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
TOO_FEW = "too few runs to tell"
# Widest interval around 1 that counts as noise, as a factor.
_WIDEST = 1.5

_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Ratio:
    """A ratio with its 95 % interval; None for a single pair."""

    ratio: float
    low: float | None
    high: float | None
    pairs: tuple[float, ...]

    def verdict(self, above: str, below: str) -> str:
        """`above` or `below` where the interval excludes 1, else noise or too few runs."""
        if self.low is None or self.high is None:
            return "one pair: no interval"
        if self.low > 1.0:
            return above
        if self.high < 1.0:
            return below
        return TOO_FEW if self.low <= 0 or self.high / self.low > _WIDEST else "inside the noise"


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio | None:
    """Geometric mean with Student's t interval on logarithms; None without pairs."""
    pairs = tuple(a / b for a, b in zip(numerators, denominators, strict=False) if a > 0 and b > 0)
    if not pairs:
        return None
    logs = [math.log(pair) for pair in pairs]
    mean = statistics.fmean(logs)
    if len(logs) == 1:
        return Ratio(math.exp(mean), None, None, pairs)
    t = _T[len(logs) - 2] if len(logs) - 2 < len(_T) else 1.98
    half = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), pairs)


def spread(values: Sequence[float]) -> tuple[float, float]:
    """10 % and 90 % quantile."""
    if len(values) == 1:
        return values[0], values[0]
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return deciles[0], deciles[-1]
