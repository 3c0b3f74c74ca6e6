"""What became faster or slower since an earlier report.

Machines differ and one machine differs from day to day, so each time is first divided by the time its own run's
ceiling allows. That ceiling is itself measured, hence a margin: a change is one only where the spreads (10 % to
90 %) of the two runs do not overlap and the medians are further apart than it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
KIND = "bench-ops"
MARGIN = 0.1

Key = tuple[str, str, str, str, str]


class BadReport(ValueError):
    """The earlier report cannot be used; the text says why and what to do."""


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
    """Read the report at `path`, or in the folder `path`.

    Raises:
        BadReport: it is not there, not readable, or not a report of this kind and version.
    """
    file = Path(path)
    file = file / "report.json" if file.is_dir() else file
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadReport(f"cannot read {file}: {error.strerror or error}; give a report.json of bench-ops") from error
    except ValueError as error:
        raise BadReport(f"{file} is not JSON: {error}; give a report.json of bench-ops") from error
    if not isinstance(report, dict) or report.get("kind") != KIND:
        kind = report.get("kind") if isinstance(report, dict) else None
        raise BadReport(f"{file} is not a report of bench-ops (its kind is {kind!r}); give one that is")
    if report.get("schema_version") != SCHEMA_VERSION:
        raise BadReport(
            f"{file} has schema_version {report.get('schema_version')!r}, this version reads {SCHEMA_VERSION}; "
            "measure the earlier state again with this version"
        )
    if report.get("ceiling") is None:
        raise BadReport(f"{file} was interrupted before the ceiling was measured; give a report with rows")
    try:
        return Earlier(
            dict(filter(None, map(_row, report["rows"]))),
            float(report["ceiling"]["flops_per_second"]),
            float(report["ceiling"]["bytes_per_second"]),
            str(report["environment"]["device"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadReport(
            f"{file} is damaged ({type(error).__name__}: {error}); measure the earlier state again"
        ) from error


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


def _row(row: Mapping[str, Any]) -> tuple[Key, Measured] | None:
    ours = _ours(row)
    return None if ours is None else (key(row), ours)


def _ours(row: Mapping[str, Any]) -> Measured | None:
    for contender in row["contenders"]:
        if contender["name"] == "mindspeed_lite" and contender["seconds"] is not None:
            return Measured(float(contender["seconds"]), float(contender["low"]), float(contender["high"]))
    return None
