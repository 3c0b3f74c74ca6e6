"""What became faster or slower since an earlier report.

Machines differ and one machine differs from day to day, so each time is first divided by the time its own run's
ceiling allows. That ceiling is itself measured, hence a margin: a change is one only where the spreads (10 % to
90 %) of the two runs do not overlap and the medians are further apart than it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_lite import json_file

SCHEMA_VERSION = 1
KIND = "bench-ops"
MARGIN = 0.1
OURS = "mindspeed_lite"

Key = tuple[str, str, str, str, str]


@dataclass(frozen=True)
class Measured:
    """Our own time in an earlier row: seconds, 10 % and 90 %."""

    seconds: float
    low: float
    high: float


@dataclass(frozen=True)
class Earlier:
    """Our own times of an earlier report by row, and its ceilings."""

    rows: Mapping[Key, Measured]
    flops_per_second: float
    bytes_per_second: float
    device: str


def load(path: str) -> Earlier:
    """Read the report at `path`, or in the folder `path`. Raises JsonFileError."""
    file = Path(path)
    found: Earlier = json_file.read(file / "report.json" if file.is_dir() else file, _REPORT)
    return found


def _contender(name: str, seconds: float | None, low: float | None, high: float | None) -> Measured | None:
    if seconds is None or low is None or high is None:
        return None
    if not low <= seconds <= high:
        raise ValueError(f"want low, seconds and high in this order, not {low:g}, {seconds:g} and {high:g}")
    return Measured(seconds, low, high) if name == OURS else None


def _row(contenders: Sequence[Measured | None], **given: str) -> tuple[Key, Measured | None]:
    return key(given), next((each for each in contenders if each is not None), None)


def _earlier(rows: Sequence[tuple[Key, Measured | None]], ceiling: Any, environment: Any, **_: Any) -> Earlier:
    return Earlier({key: ours for key, ours in rows if ours is not None}, **ceiling, **environment)


_TEXT, _RATE = json_file.text("a name"), json_file.number("a number a second", 1.0)
_SECONDS = json_file.nullable(json_file.number("seconds", 1e-12, 1e6))
_REPORT = json_file.fields(
    {
        "kind": json_file.one_of(KIND),
        "schema_version": json_file.one_of(SCHEMA_VERSION),
        # An interrupted run may have none.
        "ceiling": json_file.fields({"flops_per_second": _RATE, "bytes_per_second": _RATE}, others=True),
        "environment": json_file.fields({"device": _TEXT}, others=True),
        "rows": json_file.rows(
            json_file.fields(
                {
                    **dict.fromkeys(("operator", "case", "direction", "device", "dtype"), _TEXT),
                    "contenders": json_file.rows(
                        json_file.fields(
                            {"name": _TEXT, **dict.fromkeys(("seconds", "low", "high"), _SECONDS)},
                            others=True,
                            make=_contender,
                        )
                    ),
                },
                others=True,
                make=_row,
            )
        ),
    },
    others=True,
    make=_earlier,
)


def key(row: Mapping[str, Any]) -> Key:
    """What makes a row of one report that of another."""
    return (row["operator"], row["case"], row["direction"], row["device"], row["dtype"])


def judge(row: Mapping[str, Any], ceiling: Mapping[str, Any], earlier: Earlier) -> dict[str, Any] | None:
    """The field `earlier` of a row, or None where one of the runs has no time of ours for it."""
    then = earlier.rows.get(key(row))
    now = _ours(row)
    if then is None or now is None:
        return None
    which = "bytes_per_second" if row["bound"] == "memory" else "flops_per_second"
    # Seconds times the ceiling of the same run is work the ceiling could have done: comparable between runs.
    scale = ceiling[which] / getattr(earlier, which)
    ratio = now.seconds * scale / then.seconds
    apart = now.low * scale > then.high or now.high * scale < then.low
    verdict = "same"
    if apart and ratio > 1 + MARGIN:
        verdict = "regression"
    elif apart and ratio < 1 / (1 + MARGIN):
        verdict = "faster"
    return {"seconds": then.seconds, "ratio": ratio, "verdict": verdict}


def _ours(row: Mapping[str, Any]) -> Measured | None:
    for contender in row["contenders"]:
        if contender["name"] == OURS and contender["seconds"] is not None:
            return Measured(float(contender["seconds"]), float(contender["low"]), float(contender["high"]))
    return None
