"""What the processes of one run wrote down, read back and put side by side."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Process:
    """One process's records; `rank` may be taken by several processes of which one trains."""

    rank: int
    pid: int
    run: dict[str, Any] | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    breakdown: dict[str, Any] | None = None
    fallbacks: list[str] = field(default_factory=list)
    ended: bool = False
    memory: dict[str, Any] | None = None


def read(folder: Path) -> list[Process]:
    """The training processes of a run by rank; before the first step those that have started at all."""
    found = [_process(path) for path in sorted(folder.glob("rank*.jsonl"))]
    chosen: dict[int, Process] = {}
    for process in found:
        best = chosen.get(process.rank)
        if best is None or len(process.steps) > len(best.steps):
            chosen[process.rank] = process
    training = [process for process in chosen.values() if process.steps]
    return sorted(training or chosen.values(), key=lambda process: process.rank)


def pids(folder: Path) -> list[int]:
    """Every process that has started, helpers included."""
    return [int(path.stem.partition("-")[2]) for path in folder.glob("rank*.jsonl")]


def progress(folder: Path) -> int:
    """How many steps every process has finished."""
    counts = [len(process.steps) for process in read(folder)]
    return min(counts, default=0)


def _process(path: Path) -> Process:
    rank, _, pid = path.stem.removeprefix("rank").partition("-")
    process = Process(int(rank), int(pid))
    for line in path.read_text().splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # the process is writing it, or died while it did
            continue
        kind = entry.pop("kind")
        if kind == "run":
            process.run = entry
        elif kind == "step":
            process.steps.append(entry)
        elif kind == "profile":
            process.breakdown = entry["breakdown"]
        elif kind == "memory":
            process.memory = entry
        elif kind == "end":
            process.ended = True
            process.fallbacks = entry["fallbacks"]
    return process


def merged_steps(processes: list[Process]) -> list[dict[str, Any]]:
    """A step for each iteration that every process finished: the slowest time, and losses where a rank has them."""
    count = min((len(process.steps) for process in processes), default=0)
    merged = []
    for index in range(count):
        rows = [process.steps[index] for process in processes]
        # The last stage of a pipeline computes the loss, and the last rank is in it.
        losses: dict[str, float] = next((row["loss"] for row in reversed(rows) if row["loss"]), {})
        live = [row["live_bytes"] for row in rows]
        norms = [row["grad_norm"] for row in rows if row["grad_norm"] is not None]
        merged.append(
            {
                "iteration": rows[0]["iteration"],
                "seconds": max(row["seconds"] for row in rows),
                "measured": rows[0]["measured"],
                "profiled": rows[0]["profiled"],
                "loss": losses,
                "grad_norm": norms[-1] if norms else None,
                "memory_bytes": max(row["memory_bytes"] for row in rows),
                "live_bytes": None if None in live else max(live),
            }
        )
    return merged
