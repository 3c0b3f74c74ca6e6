"""Runs short trainings of a script in turns: what slows a machine down for a second slows a turn, not a training."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mindspeed_lite.bench import records
from mindspeed_lite.bench.calibration.run import CalibrationError
from mindspeed_lite.child_process import child_process

# Of a turn.
STEPS = 2
# The file that says why a training ended early.
WHY = "why.txt"
_TAIL = 400


@dataclass(frozen=True)
class Training:
    """A script's arguments, and on how many processes they run."""

    words: tuple[str, ...]
    ranks: int = 1


def measured_steps(
    script: str, trainings: Sequence[Training], folder: Path, turns: int, warmup: int = 2, timeout: float = 120.0
) -> list[list[float] | str]:
    """Seconds of each step of each training, on its slowest rank; or why there are none, one line.

    Some are started together, and take turns of `STEPS` steps; then others.

    Args:
        folder: an empty one, for logs and records.
        timeout: seconds of a training's start, and of a turn.

    Raises:
        CalibrationError: Megatron cannot be imported, or the trainings did not end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    jobs = folder / "jobs.json"
    given = [asdict(each) for each in trainings]
    told = {"script": script, "turns": turns, "warmup": warmup, "timeout": timeout, "trainings": given}
    jobs.write_text(json.dumps(told))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MINDSPEED_LITE_DEVICE": "cpu",
        # Processes that compile do not outlive a fork.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    log = folder / "log.txt"
    command = [sys.executable, "-m", "mindspeed_lite.bench.calibration.turns", str(jobs)]
    with log.open("w") as output:
        started = child_process(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        with started as process, contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout * (1 + turns) * (1 + len(trainings)))
    if process.returncode:
        raise CalibrationError(f"{script}: {last_line(log)}")
    return [_outcome(folder / str(number), each, turns * STEPS) for number, each in enumerate(trainings)]


def _outcome(folder: Path, training: Training, steps: int) -> list[float] | str:
    processes = records.read(folder)
    if len(processes) == training.ranks and all(len(each.steps) >= steps and each.ended for each in processes):
        rows = zip(*(each.steps[-steps:] for each in processes), strict=True)
        return [max(each["seconds"] for each in row) for row in rows]
    told = [last_line(folder / each) for each in (WHY, *(f"rank{rank}.log" for rank in range(training.ranks)))]
    return next((each for each in told if each), "it ended without its steps")


def last_line(log: Path) -> str:
    """The last one that is not empty, as far as it says something; "" where there is none."""
    lines = log.read_text(errors="replace").split("\n") if log.is_file() else []
    return next((each.strip()[-_TAIL:] for each in reversed(lines) if each.strip()), "")
