"""Starts the processes of a calibration and puts together what they measured: a file for `planner.calibrated`."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mindspeed_lite._version import __version__
from mindspeed_lite.child_process import child_process
from mindspeed_lite.planner.calibrated import FORMAT


class CalibrationError(RuntimeError):
    """A process of the measurement failed; one line."""


def measure(ranks: int, seconds: float, timeout: float = 600.0) -> dict[str, Any]:
    """What so many processes measure on this machine, as the file holds it.

    Raises:
        CalibrationError: a process failed or took too long.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mindspeed-lite-calibrate-") as name:
        folder = Path(name)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MINDSPEED_LITE_DEVICE": "cpu"}
        with contextlib.ExitStack() as running:
            processes = []
            for rank in range(ranks):
                command = [sys.executable, "-m", "mindspeed_lite.bench.calibration.worker"]
                command += [str(rank), str(ranks), name, str(seconds)]
                log = running.enter_context((folder / f"rank{rank}.log").open("w"))
                started = child_process(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
                processes.append(running.enter_context(started))
            while any(each.poll() is None for each in processes):
                if any(each.poll() for each in processes) or time.monotonic() - began > timeout:
                    break
                time.sleep(0.1)
        file = folder / "measured.json"
        if any(each.returncode for each in processes) or not file.is_file():
            tail = [(folder / f"rank{rank}.log").read_text()[-500:] for rank in range(ranks)]
            raise CalibrationError(f"a process failed: {next((each for each in tail if each), 'it took too long')}")
        found = json.loads(file.read_text())
    import torch

    cores = len(os.sched_getaffinity(0))
    return {
        "format": FORMAT,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - began, 1),
        "device": processor(),
        "kind": "cpu",
        "cores": cores,
        "ranks_per_node": cores,
        # A message of gloo's is computed by the core that would compute beside it.
        "overlap": 0.0,
        "versions": {
            "mindspeed_lite": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        **found,
    }


def processor() -> str:
    """What the processor is called."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
