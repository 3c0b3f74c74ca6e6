"""Starts ranks of a launch and reads what they counted."""

from __future__ import annotations

import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_lite.child_process import child_process
from mindspeed_lite.planner.published import PublishedDevice

from .calls import GroupCall
from .launch import TrainingLaunch

# Worlds up to this size run whole.
WHOLE = 8
_TAIL = 12
# Errors, or how they begin: a script ends with a code, or without a step; a rank waits for another's values.
ENDED, NO_STEP = "the script ended with ", "the script ended without a training step"
WAITS = "waits for rank"
# Seconds that imports may take, whose end starts the ranks' time.
_IMPORTS = 60.0


@dataclass(frozen=True)
class RankResult:
    """What a rank of the training does in a step.

    Attributes:
        memory: bytes of weights, gradients, optimizer states, and activations at their peak; `kept`: these by place.
        work: launches, floating-point operations and bytes by module and pass, the largest first.
        host: calls that wait for the device, by place, and calls of modules.
        messages: since its process began; the first `in_step` until the end of the step.
        groups: ranks of its group by the group's name in Megatron.
        micro_batches: run, and in the training.
        is_alike: it did not run, since the stages before and after have the same parameters.
        left_out: arguments that were turned off. is_engine_replaced: other layers ran than Transformer Engine's.
        time: on a device, from `timing.of_step`; empty without one.
        error: one line, or empty. ended_at: what fails first may fail others.
    """

    number: int
    memory: Mapping[str, Any] = field(default_factory=dict)
    work: Sequence[Mapping[str, Any]] = ()
    host: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[GroupCall] = ()
    in_step: int = 0
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    micro_batches: tuple[int, int] = (0, 0)
    features: Sequence[tuple[str, str, str]] = ()
    error: str = ""
    left_out: Sequence[str] = ()
    is_engine_replaced: bool = False
    time: Mapping[str, Any] = field(default_factory=dict)
    ended_at: float = math.inf
    is_alike: bool = False
    log_tail: Sequence[str] = ()


def run(
    launch: TrainingLaunch, timeout: float, vocabulary: int | None = None, device: PublishedDevice | None = None,
    expert_load: float = 1.0,
) -> list[RankResult]:  # fmt: skip
    """All ranks of a small world; of a large one rank 0 and its pipeline's other stages, but for alike ones.

    device: whose time is predicted. expert_load: tokens of the first expert over the mean.
    """
    with tempfile.TemporaryDirectory(prefix="mindspeed-lite-dryrun-") as name:
        folder = Path(name)
        asked = {
            "world_size": launch.world_size, "local_size": launch.local_size, "words": launch.words, "folder": name,
            "vocabulary": vocabulary, "device": device and asdict(device),
            "expert_load": expert_load, "timeout": timeout,
            "replaces_engine": device is None or device.figures.kind != "npu",
            "ranks": [*range(launch.world_size)] if launch.world_size <= WHOLE else None,
        }  # fmt: skip
        request = folder / "request"
        request.write_text(json.dumps(asked))
        command = [sys.executable, "-m", "mindspeed_lite.dryrun.worker", str(request)]
        environment = {**launch.environment, "OMP_NUM_THREADS": "1"}
        here = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [here, environment.get("PYTHONPATH", "")]))
        ending = "its process ended without a result"
        with (folder / "log").open("wb") as log, child_process(
            command, cwd=launch.folder, env=environment, stdout=log, stderr=subprocess.STDOUT
        ) as child:  # fmt: skip
            try:
                child.wait(_IMPORTS + timeout)
            except subprocess.TimeoutExpired:
                ending = f"no step within {timeout:g} seconds"
        ranks = {0, *(int(each.name.partition("-")[2]) for each in folder.glob("log-*"))}
        return [_read(folder, each, ending) for each in sorted(ranks)]


def _read(folder: Path, number: int, ending: str) -> RankResult:
    result, log, ended = (folder / f"{name}-{number}" for name in ("result", "log", "ended"))
    found: dict[str, Any] = pickle.loads(result.read_bytes()) if result.exists() else {"error": ending}
    lines = (log if log.exists() else folder / "log").read_text(errors="replace").splitlines()[-_TAIL:]
    if found["error"].startswith(ENDED) and lines:
        found["error"] += f": {lines[-1]}"
    return RankResult(
        number=number,
        ended_at=ended.stat().st_mtime if ended.exists() else math.inf,
        log_tail=lines if found["error"] else (),
        **found,
    )
