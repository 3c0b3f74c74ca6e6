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

from .launch import TrainingLaunch
from .world import GroupCall

# Worlds up to this size run whole.
WHOLE = 8
_TAIL = 12


@dataclass(frozen=True)
class RankResult:
    """What a rank of the training does in a step.

    Attributes:
        memory: bytes of weights, gradients, optimizer states, and activations at their peak; `kept`: these by place.
        messages: since its process began; the first `in_step` until the end of the step.
        groups: ranks of its group by the group's name in Megatron.
        micro_batches: run, and in the training.
        flags: small integer tensors that it sends.
        error: one line, or empty.
    """

    number: int
    memory: Mapping[str, Any]
    messages: Sequence[GroupCall]
    in_step: int
    groups: Mapping[str, tuple[int, ...]]
    micro_batches: tuple[int, int]
    features: Sequence[tuple[str, str, str]]
    flags: Mapping[tuple[int, ...], Sequence[Sequence[Any]]]
    error: str
    log_tail: Sequence[str] = ()


def run(launch: TrainingLaunch, timeout: float, workers: int) -> list[RankResult]:
    """Rank 0 and its pipeline's other stages; all ranks of a small world."""
    found = [run_one(launch, 0, timeout, {})]
    if found[0].error:
        return found
    others = (
        range(1, launch.world_size)
        if launch.world_size <= WHOLE
        else found[0].groups["PIPELINE_MODEL_PARALLEL_GROUP"][1:]
    )
    # The first rank of a tensor-parallel group tells the others what it reads.
    tensor = len(found[0].groups["TENSOR_MODEL_PARALLEL_GROUP"])
    with ThreadPoolExecutor(workers) as pool:
        for are_first in (True, False):
            known = {group: values for each in found for group, values in each.flags.items()}
            wave = [each for each in others if (each % tensor == 0) == are_first]
            found += pool.map(lambda number: run_one(launch, number, timeout, known), wave)  # noqa: B023
    return sorted(found, key=lambda each: each.number)


def run_one(
    launch: TrainingLaunch, number: int, timeout: float, known: Mapping[tuple[int, ...], Sequence[Sequence[Any]]]
) -> RankResult:
    with tempfile.TemporaryDirectory(prefix="mindspeed-lite-dryrun-") as folder:
        request, result, log = (Path(folder, name) for name in ("request.json", "result.json", "log"))
        asked = {
            "rank": number, "world_size": launch.world_size, "local_size": launch.local_size,
            "words": launch.words, "result": str(result), "known": list(known.items()),
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
    messages = [_message(each) for each in found["messages"]]
    return RankResult(
        number=number,
        memory=found["memory"],
        messages=messages,
        in_step=found.get("in_step", 0),
        groups={name: tuple(ranks) for name, ranks in found["groups"].items()},
        micro_batches=(found["micro_batches"], found.get("all_micro_batches", 0)),
        features=[tuple(each) for each in found["features"]],
        flags={tuple(group): each for group, each in found["flags"]},
        error=found["error"],
        log_tail=lines,
    )


def _message(fields: dict[str, Any]) -> GroupCall:
    given: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in fields.items()}
    return GroupCall(**given)


def _failed(number: int, error: str, log: Path) -> RankResult:
    lines = log.read_text(errors="replace").splitlines()[-_TAIL:]
    return RankResult(number, {}, [], 0, {}, (0, 0), [], {}, error, lines)
