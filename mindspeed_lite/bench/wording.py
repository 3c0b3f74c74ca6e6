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
_NOT_FINITE = ("nan", "inf", "-inf")
_SECONDS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
_BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
_PREFIXES = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))


def cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return float(value) if value in _NOT_FINITE else _CONTROL.sub("", value)
    if isinstance(value, Mapping):
        return {_CONTROL.sub("", key): cleaned(each) for key, each in value.items()}
    return [cleaned(each) for each in value] if isinstance(value, list | tuple) else value


def significant(value: float, digits: int = 3) -> str:
    """Number to so many digits, without exponent, thousands separated."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    return f"{rounded:,.{max(0, digits - 1 - math.floor(math.log10(abs(rounded))))}f}"


def _scaled(value: float | None, units: Sequence[tuple[str, float]], digits: int, suffix: str = "") -> str:
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return f"0 {units[0][0] if units is _SECONDS else units[-1][0]}{suffix}".rstrip()
    unit, scale = next((each for each in units if float(f"{abs(value) / each[1]:.{digits - 1}e}") >= 1), units[-1])
    return f"{significant(value / scale, digits)} {unit}{suffix}".rstrip()


def seconds(value: float | None) -> str:
    """`1.234 s`, `12.34 ms`."""
    return _scaled(value, _SECONDS, 4)


def size(value: float | None) -> str:
    """Decimal units: `812 MB`, `1.52 GB`."""
    return _scaled(value, _BYTES, 3)


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


def between(low: float | None, high: float | None) -> str:
    """`405.8 to 420.2 ms`."""
    if low is None or high is None:
        return UNKNOWN
    first, last = seconds(low), seconds(high)
    start, _, unit = first.partition(" ")
    return f"{start if unit == last.partition(' ')[2] else first} to {last}"


def interval(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """`1.24x (1.20 to 1.28)`; three digits near 1."""
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
        low, high = min(ratio["pairs"]), max(ratio["pairs"])
        return f"{low:.2f}x to {high:.2f}x, {verdict}"
    return f"{interval(ratio['ratio'], ratio.get('low'), ratio.get('high'))}, {verdict}"


def listed(values: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(values[:-1]), *values[-1:])))
