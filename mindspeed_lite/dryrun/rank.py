"""Starts ranks of a launch, each in a process of its own, and reads what they counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_lite.child_process import child_process

from .launch import Launch
from .world import Message

# Worlds up to this size run whole.
WHOLE = 8
_TAIL = 12


@dataclass(frozen=True)
class Rank:
    """What a rank of the training does in a step.

    memory: bytes of weights, gradients, optimizer states and activations at their peak; `kept`: the latter by place.
    messages: since its process began; the first `in_step` until the end of the step. names: Megatron's name by group. micro_batches: run, and in the training.
    stages: ranks of its pipeline. error: one line, or empty.
    """

    number: int
    memory: Mapping[str, Any]
    messages: Sequence[Message]
    in_step: int
    names: Mapping[tuple[int, ...], str]
    micro_batches: tuple[int, int]
    stages: tuple[int, ...]
    features: Sequence[tuple[str, str, str]]
    error: str
    log_tail: Sequence[str] = ()


def run(launch: Launch, timeout: float, workers: int) -> list[Rank]:
    """Rank 0 and its pipeline's other stages; all ranks of a small world."""
    first = run_one(launch, 0, timeout)
    if first.error:
        return [first]
    others = range(1, launch.world_size) if launch.world_size <= WHOLE else first.stages[1:]
    with ThreadPoolExecutor(workers) as pool:
        return [first, *pool.map(lambda number: run_one(launch, number, timeout), others)]


def run_one(launch: Launch, number: int, timeout: float) -> Rank:
    with tempfile.TemporaryDirectory(prefix="mindspeed-lite-dryrun-") as folder:
        request, result, log = (Path(folder, name) for name in ("request.json", "result.json", "log"))
        asked = {
            "rank": number, "world_size": launch.world_size, "local_size": launch.local_size,
            "words": launch.words, "result": str(result),
        }  # fmt: skip
        request.write_text(json.dumps(asked))
        command = [sys.executable, "-m", "mindspeed_lite.dryrun.worker", str(request)]
        environment = {**launch.environment, "OMP_NUM_THREADS": "1"}
        here = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [here, environment.get("PYTHONPATH", "")]))
        with log.open("wb") as output, child_process(
            command, cwd=launch.folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        ) as child:  # fmt: skip
            try:
                child.wait(timeout)
            except subprocess.TimeoutExpired:
                return _failed(number, f"no step within {timeout:g} seconds", log)
        if not result.exists():
            return _failed(number, f"its process ended with exit code {child.returncode}", log)
        found = json.loads(result.read_text())
        lines = log.read_text(errors="replace").splitlines()[-_TAIL:] if found["error"] else []
    messages = [
        Message(**{name: tuple(value) if isinstance(value, list) else value for name, value in each.items()})
        for each in found["messages"]
    ]
    return Rank(
        number, found["memory"], messages, found.get("in_step", 0), {tuple(ranks): name for ranks, name in found["names"]},
        (found["micro_batches"], found.get("all_micro_batches", 0)), tuple(found.get("stages", ())),
        [tuple(each) for each in found["features"]], found["error"], lines,
    )  # fmt: skip


def _failed(number: int, error: str, log: Path) -> Rank:
    lines = log.read_text(errors="replace").splitlines()[-_TAIL:]
    return Rank(number, {}, [], 0, {}, (0, 0), (), [], error, lines)
