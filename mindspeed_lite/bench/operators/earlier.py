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
Key = tuple[str, ...]


@dataclass(frozen=True)
class Earlier:
    """An earlier report: own times by row, ceiling per second, device."""

    rows: Mapping[Key, Mapping[str, float]]
    ceiling: Mapping[str, float]
    device: str


def load(path: str) -> Earlier:
    file = Path(path)
    found: Earlier = json_file.read(file / "report.json" if file.is_dir() else file, _REPORT)
    return found


def _contender(name: str, **times: float | None) -> tuple[str, Mapping[str, float] | None]:
    given = {key: value for key, value in times.items() if value is not None}
    if len(given) < len(times):
        return name, None
    if not given["low"] <= given["seconds"] <= given["high"]:
        raise ValueError(
            "want low, seconds and high in this order, not {low:g}, {seconds:g} and {high:g}".format(**given)
        )
    return name, given


def _earlier(rows: Any, ceiling: Any, environment: Any, **_: Any) -> Earlier:
    ours = {_key(row): dict(row["contenders"]).get(OURS) for row in rows}
    return Earlier({key: times for key, times in ours.items() if times}, ceiling, environment["device"])


def _fields(**known: Any) -> Any:
    return json_file.fields(known, others=True)


_TEXT, _RATE = json_file.text("a name"), json_file.number("a number a second", 1.0)
_SECONDS = json_file.nullable(json_file.number("seconds", 1e-12, 1e6))
_CONTENDER = {"name": _TEXT, **dict.fromkeys(("seconds", "low", "high"), _SECONDS)}
_REPORT = json_file.fields(
    {
        "kind": json_file.one_of(KIND),
        "schema_version": json_file.one_of(SCHEMA_VERSION),
        "ceiling": _fields(flops_per_second=_RATE, bytes_per_second=_RATE),
        "environment": _fields(device=_TEXT),
        "rows": json_file.rows(
            _fields(
                **dict.fromkeys(_KEYS, _TEXT),
                contenders=json_file.rows(json_file.fields(_CONTENDER, others=True, make=_contender)),
            )
        ),
    },
    others=True,
    make=_earlier,
)


def _key(row: Mapping[str, Any]) -> Key:
    return tuple(row[name] for name in _KEYS)


def judge(row: Mapping[str, Any], ceiling: Mapping[str, Any], earlier: Earlier) -> dict[str, Any] | None:
    then = earlier.rows.get(_key(row))
    now = next((each for each in row["contenders"] if each["name"] == OURS and each["seconds"] is not None), None)
    if then is None or now is None:
        return None
    rate = "bytes_per_second" if row["bound"] == "memory" else "flops_per_second"
    scale = ceiling[rate] / earlier.ceiling[rate]
    ratio = now["seconds"] * scale / then["seconds"]
    apart = now["low"] * scale > then["high"] or now["high"] * scale < then["low"]
    verdict = "same"
    if apart and ratio > 1 + MARGIN:
        verdict = "regression"
    elif apart and ratio < 1 / (1 + MARGIN):
        verdict = "faster"
    return {"seconds": then["seconds"], "ratio": ratio, "verdict": verdict}
