"""Formats values of a report as text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .statistics import TOO_FEW

UNKNOWN = "-"

# Escape sequences, and control characters except tab and newline.
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SECONDS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
_PREFIXES = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))


def cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return _CONTROL.sub("", value)
    if isinstance(value, Mapping):
        return {_CONTROL.sub("", key): cleaned(each) for key, each in value.items()}
    return [cleaned(each) for each in value] if isinstance(value, list | tuple) else value


def significant(value: float, digits: int = 3) -> str:
    """Number to so many digits, without exponent, thousands separated."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    rounded = float(f"{value:.{digits - 1}e}")
    return f"{rounded:,.{max(0, digits - 1 - math.floor(math.log10(abs(rounded))))}f}"


def _scaled(value: float | None, units: Sequence[tuple[str, float]], digits: int, unit: str = "") -> str:
    if value is None or not math.isfinite(value):
        return UNKNOWN if value is None else str(value)
    fits = (each for each in units if float(f"{abs(value) / each[1]:.{digits - 1}e}") >= 1)
    prefix, scale = next(fits, units[-1]) if value else next(each for each in units if each[1] == 1.0)
    return f"{significant(value / scale, digits)} {prefix}{unit}"


def seconds(value: float | None) -> str:
    """`1.234 s`, `12.34 ms`."""
    return _scaled(value, _SECONDS, 4)


def size(value: float | None) -> str:
    """Decimal units: `812 MB`, `1.52 GB`."""
    return _scaled(value, _PREFIXES[1:], 3, "B")


def flops(value: float | None) -> str:
    """`812 TFLOP`."""
    return _scaled(value, _PREFIXES, 3, "FLOP")


def rate(value: float | None, unit: str) -> str:
    """`812 TFLOP/s`, `3.35 TB/s`."""
    return _scaled(value, _PREFIXES, 3, f"{unit}/s")


def tokens(value: float | None) -> str:
    """Tokens per second, whole from 100 on."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f} tokens/s" if value >= 100 else f"{significant(value)} tokens/s"


def percent(value: float | None) -> str:
    """`41.2 %`."""
    return UNKNOWN if value is None else f"{significant(value * 100)} %"


def difference(value: float | None) -> str:
    """Loss difference: `1.39e-03`."""
    return UNKNOWN if value is None else f"{value:.2e}" if value else "0"


def interval(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """Format a ratio and its interval: `1.24x (1.20 to 1.28)`; three decimals near 1."""
    if value is None:
        return UNKNOWN
    known = [each for each in (value, low, high) if each is not None]
    near_one = any(abs(each - 1) < 0.02 for each in known)
    digits = 3 if near_one or 0 < max(known) - min(known) < 0.02 else 2
    limits = "" if low is None or high is None else f" ({low:,.{digits}f} to {high:,.{digits}f})"
    return f"{value:,.{digits}f}x{limits}"


def judged(ratio: Mapping[str, Any] | None) -> str:
    """`1.24x (1.20 to 1.28), faster`."""
    if ratio is None:
        return UNKNOWN
    verdict = ratio["verdict"].partition(":")[0]
    if verdict == TOO_FEW:  # mean and interval have no meaning
        return f"{min(ratio['pairs']):.2f}x to {max(ratio['pairs']):.2f}x, {verdict}"
    return f"{interval(ratio['ratio'], ratio.get('low'), ratio.get('high'))}, {verdict}"
