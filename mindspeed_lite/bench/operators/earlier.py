"""Finds rows of `bench-ops` that are slower than in an earlier report.

Times are scaled by each run's ceiling, so that machines compare. A change needs disjoint 10 % to 90 % spreads and
medians that differ by more than `MARGIN`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_lite import json_file
from mindspeed_lite.ops.case import OURS

SCHEMA_VERSION = 1
KIND = "bench-ops"
MARGIN = 0.1

_KEYS = ("operator", "case", "direction", "device", "dtype")
_TIMES = ("seconds", "low", "high")


@dataclass(frozen=True)
class Earlier:
    """An earlier report: own times by row, ceiling per second, device."""

    rows: Mapping[tuple[str, ...], Mapping[str, float]]
    ceiling: Mapping[str, float]
    device: str


def load(path: str) -> Earlier:
    file = Path(path)
    found: Earlier = json_file.read(file / "report.json" if file.is_dir() else file, _REPORT)
    return found


def _earlier(rows: Any, ceiling: Any, environment: Any, **_: Any) -> Earlier:
    found = ((_key(row), _own_times(row)) for row in rows)
    return Earlier({key: times for key, times in found if times is not None}, ceiling, environment["device"])


def _fields(**known: Any) -> Any:
    return json_file.fields(known, others=True)


_TEXT, _RATE = json_file.text("a name"), json_file.number("a number a second", 1.0)
_SECONDS = json_file.nullable(json_file.number("seconds", 1e-12, 1e6))
_CONTENDERS = json_file.rows(_fields(name=_TEXT, **dict.fromkeys(_TIMES, _SECONDS)))
_REPORT = json_file.fields(
    {
        "kind": json_file.one_of(KIND),
        "schema_version": json_file.one_of(SCHEMA_VERSION),
        "ceiling": _fields(flops_per_second=_RATE, bytes_per_second=_RATE),
        "environment": _fields(device=_TEXT),
        "rows": json_file.rows(_fields(**dict.fromkeys(_KEYS, _TEXT), contenders=_CONTENDERS)),
    },
    others=True,
    make=_earlier,
)


def _key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(row[name] for name in _KEYS)


def _own_times(row: Mapping[str, Any]) -> dict[str, float] | None:
    ours: Mapping[str, Any] = next((each for each in row["contenders"] if each["name"] == OURS), {})
    times = {name: ours.get(name) for name in _TIMES}
    return None if None in times.values() else times  # type: ignore[return-value]


def judge(row: Mapping[str, Any], ceiling: Mapping[str, Any], earlier: Earlier) -> dict[str, Any] | None:
    then, now = earlier.rows.get(_key(row)), _own_times(row)
    if then is None or now is None:
        return None
    rate = "bytes_per_second" if row["bound"] == "memory" else "flops_per_second"
    scale = ceiling[rate] / earlier.ceiling[rate]
    ratio = now["seconds"] * scale / then["seconds"]
    verdict = "same"
    if now["low"] * scale > then["high"] and ratio > 1 + MARGIN:
        verdict = "regression"
    elif now["high"] * scale < then["low"] and ratio < 1 / (1 + MARGIN):
        verdict = "faster"
    return {"seconds": then["seconds"], "ratio": ratio, "verdict": verdict}
