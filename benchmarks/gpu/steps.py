"""The steps of the campaign in the order of their worth: each runs commands of this repository and keeps what they say.

`measure` brings a record up to date within its seconds; what is complete and was measured with these sources stays.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.configurations import CONFIGURATIONS
from benchmarks.gpu.kernels import SHAPES, measured
from lab import stamps
from mindspeed_lite.bench import isolated
from mindspeed_lite.child_process import child_process, terminate

ROOT = Path(__file__).resolve().parents[2]
Record = dict[str, Any]
STOPPED = "its time was up"
# Longest time of one operator, in seconds.
_SILENT = 40.0
# By step of a training: its configuration, the script in place of the common one, and options of `bench`.
TRAININGS = {
    "dense": ("dense", "", "--all --repeats 2"),
    "dense with Liger-Kernel's patch": ("dense", "benchmarks/gpu/liger_pretrain_gpt.py", "--noise --repeats 1"),
    "experts": ("experts", "", "--all --repeats 2"),
}


class Run(NamedTuple):
    """Where and how everything runs."""

    device: str
    tiny: bool
    scratch: Path
    environment: Mapping[str, str]

    def ending(self, words: Sequence[str], log: Path, limit: float) -> str:
        """Run a command of this Python; how it ended."""
        with (
            log.open("w") as file,
            child_process(
                [sys.executable, *words], terminate, cwd=ROOT, env=self.environment,
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            ) as child,
        ):  # fmt: skip
            try:
                return f"exit code {child.wait(limit)}"
            except subprocess.TimeoutExpired:
                return STOPPED


def _tests(run: Run, record: Record, limit: float) -> None:
    """The tests marked `cuda`: every operator against float64, and what is special about kernels."""
    words = ["-m", "pytest", "-vv", "-p", "no:cacheprovider", "--tb=line", "-m", "cuda", "-n", "8", "tests/ops"]
    if run.tiny:
        words[-3:] = ["-n", "1", "tests/ops/test_grouped_matmul_cuda.py"]
    log = run.scratch / "tests.log"
    how = run.ending(words, log, limit)
    ended = re.findall(r"(PASSED|FAILED|ERROR|SKIPPED) (tests/.+?)\s*$", log.read_text(errors="replace"), re.MULTILINE)
    found = {test: state.lower() for state, test in ended}
    record |= {"tests": found, "stamp": stamps.of_all()}
    bad = [name for name, state in found.items() if state in ("failed", "error")]
    how = "" if how in ("exit code 0", "exit code 5") else f"{how}: {_last_line(log)}"  # 5: no test was chosen
    record["reason"] = f"{len(bad)} tests, the first {bad[0]}" if bad else how
    record["state"] = "failed" if bad or how.startswith("exit") else "stopped" if how else "complete"


def _kernels(run: Run, record: Record, limit: float) -> None:
    """Times what is left; an operator that crashes or hangs costs no other."""
    end = time.monotonic() + limit
    record["stamp"] = stamps.of_all()
    found: dict[str, Record] = record.setdefault("operators", {})
    left = [name for name in SHAPES if found.get(name, {}).get("stamp") != stamps.of_operator(name)]
    name = how = ""
    while left and not how:
        try:
            for name, told in isolated.messages(partial(measured, left[:], run.device, run.tiny), _SILENT):
                if not name:
                    record |= told
                elif told:
                    found[name] = told if "failed" in told else told | {"stamp": stamps.of_operator(name)}
                    left.remove(name)
                    print(f"   {name}: {told.get('failed', 'measured')}", flush=True)
                if time.monotonic() >= end:
                    how = STOPPED
                    break
        except isolated.ProcessEnded as error:
            if name in left:
                found[name] = {"failed": str(error)}
                left.remove(name)
            else:  # it is no fault of an operator
                how = str(error)
    failed = [name for name, each in found.items() if "failed" in each]
    record["reason"] = how if left else ", ".join(failed)
    record["state"] = "failed" if failed or (left and how != STOPPED) else "stopped" if left else "complete"


def _training(name: str, run: Run, record: Record, limit: float) -> None:
    configuration_name, script, options = TRAININGS[name]
    if script and (run.device == "cpu" or importlib.util.find_spec("liger_kernel") is None):
        record |= {"state": "skipped", "reason": "liger-kernel is not installed, or needs a GPU"}
        return
    group = CONFIGURATIONS["tiny" if run.tiny else "gpu"]
    command = next(each for each in group if each.name == configuration_name).command()
    if script:
        command = [script if word == "examples/pretrain_gpt.py" else word for word in command]
    folder, steps = run.scratch / name.replace(" ", "-"), "1 --steps 2" if run.tiny else "3 --steps 8"
    words = ["-m", "mindspeed_lite", "bench", *options.split(), *f"--warmup {steps} --no-profile".split()]
    words += ["--rounding-baseline", "none", "--timeout", "90", "--title", name, "--out", os.path.relpath(folder, ROOT)]
    (folder / "report.json").unlink(missing_ok=True)
    log = run.scratch / f"{folder.name}.log"
    how = run.ending([*words, "--", *command], log, limit)
    if not (folder / "report.json").is_file():
        record |= {"state": "failed", "reason": f"{how}: {_last_line(log)}"}
        return
    report = json.loads((folder / "report.json").read_text())
    wrong = [each["text"] for each in report["findings"] if each["severity"] == "failure"]
    record |= {
        "command": command,
        "flops_per_step": (report["model"] or {}).get("flops_per_step"),
        "arms": {arm["name"]: _arm(arm) for arm in report["arms"]},
        "loss_apart": next(((each["loss"] or {}).get("largest_difference") for each in report["comparisons"]), None),
        "stamp": stamps.of_all(),
        "state": "failed" if wrong else "complete" if report["complete"] else "stopped",
        "reason": "; ".join(wrong) or ("" if report["complete"] else how),
    }


def _arm(arm: Record) -> Record:
    runs = [run for run in arm["runs"] if run["status"] == "ok"]
    return {
        "steps": [run["median_step_seconds"] for run in runs],
        "peak_memory_bytes": max((max(run["peak_memory_bytes"]) for run in runs), default=None),
        "features": arm["features"],
        "fallbacks": arm["fallbacks"],
    }


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it printed nothing")


class Step(NamedTuple):
    """seconds: when it is stopped; slack of earlier steps is added. least: with less left it does not start."""

    name: str
    about: str
    seconds: float
    least: float
    work: Callable[[Run, Record, float], None]

    def is_current(self, record: Record) -> bool:
        return record.get("state") == "complete" and record.get("stamp") == stamps.of_all()

    def measure(self, run: Run, record: Record, limit: float) -> None:
        if self.is_current(record):
            print(f"== {self.name}: measured in an earlier call", flush=True)
            return
        print(f"== {self.name}: {self.about}; at most {limit:.0f} s", flush=True)
        began = time.monotonic()
        # The stamp stays that of its figures until there are new ones.
        record |= {"about": self.about, "state": "stopped", "reason": "interrupted"}
        try:
            self.work(run, record, limit)
        except Exception as error:  # the other steps are worth their time
            record |= {"state": "failed", "reason": f"{type(error).__name__}: {error}"}
        record["seconds"] = round(time.monotonic() - began, 1)
        print(f"== {self.name}: {record['seconds']:.0f} s, {record['state']} {record['reason']}", flush=True)


_DENSE, _EXPERTS = (each.about for each in CONFIGURATIONS["gpu"])
STEPS = (
    Step("tests", "tests of CUDA kernels, every operator against float64", 150, 20, _tests),
    Step("kernels", "every operator, PyTorch's and Liger-Kernel's", 90, 30, _kernels),
    Step("dense", _DENSE, 140, 60, partial(_training, "dense")),
    Step("dense with Liger-Kernel's patch", _DENSE, 60, 40,
         partial(_training, "dense with Liger-Kernel's patch")),
    Step("experts", _EXPERTS, 110, 60, partial(_training, "experts")),
)  # fmt: skip
