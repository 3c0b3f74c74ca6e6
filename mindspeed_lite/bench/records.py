"""Reads what the processes of one run wrote."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Process:
    """Records of one process by kind (see `recorder`); ranks may repeat."""

    rank: int
    run: dict[str, Any] | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    breakdown: dict[str, Any] | None = None
    end: dict[str, Any] | None = None


def read(folder: Path) -> list[Process]:
    chosen: dict[int, Process] = {}
    for path in sorted(folder.glob("rank*.jsonl")):
        process = _process(path)
        best = chosen.get(process.rank)
        if best is None or len(process.steps) > len(best.steps):
            chosen[process.rank] = process
    training = [process for process in chosen.values() if process.steps]
    return sorted(training or chosen.values(), key=lambda process: process.rank)


def pids(folder: Path) -> list[int]:
    return [int(path.stem.partition("-")[2]) for path in folder.glob("rank*.jsonl")]


def _process(path: Path) -> Process:
    process = Process(int(path.stem.removeprefix("rank").partition("-")[0]))
    for line in path.read_text().splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # unfinished line
            continue
        kind = entry.pop("kind")
        if kind == "step":
            process.steps.append(entry)
        else:
            setattr(process, kind, entry)
    return process


def merged_steps(processes: list[Process]) -> list[dict[str, Any]]:
    """Steps that every process finished: slowest time, losses of the last rank that has them."""
    merged = []
    for rows in zip(*(process.steps for process in processes), strict=False):
        live = [row["live_bytes"] for row in rows]
        merged.append(
            {
                **{name: rows[0][name] for name in ("iteration", "measured")},
                "seconds": max(row["seconds"] for row in rows),
                "loss": next((row["loss"] for row in reversed(rows) if row["loss"]), {}),
                "grad_norm": next((row["grad_norm"] for row in reversed(rows) if row["grad_norm"] is not None), None),
                "live_bytes": None if None in live else max(live),
            }
        )
    return merged
