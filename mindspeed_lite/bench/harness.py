"""Runs the user's command for one arm and collects its measurements."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_lite.bench.plan import VARIABLE, Arm, Job, RunPlan
from mindspeed_lite.child_process import child_process, terminate

_INJECT = Path(__file__).parent / "inject"

_POLL = 0.25  # seconds
_MOST_TO_END = 60.0  # seconds from the last step to the end
_GRACE = 10.0  # seconds for a hung process to write its stacks and end
_TAIL = 40


@dataclass
class Process:
    """Records of one process by kind (see `recorder`); ranks may repeat."""

    rank: int
    run: dict[str, Any] | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    breakdown: dict[str, Any] | None = None
    end: dict[str, Any] | None = None

    @property
    def memory(self) -> dict[str, Any]:
        """Counted bytes by category, with `parameters` and the activations `kept`; empty if not counted."""
        return (self.end or {}).get("memory") or {}

    @property
    def peak(self) -> int:
        return max((step["peak_memory_bytes"] for step in self.steps), default=0)


@dataclass
class Outcome:
    """A finished run; `status` is ok, crashed, hung or no steps."""

    arm: Arm
    repeat: int
    log: str
    launched: float
    status: str = "ok"
    reason: str | None = None
    seconds: float = 0.0
    exit_code: int | None = None
    processes: list[Process] = field(default_factory=list)
    log_tail: list[str] = field(default_factory=list)

    @property
    def run(self) -> dict[str, Any] | None:
        """Environment, model and features of the first training process."""
        return next((process.run for process in self.processes if process.run), None)

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Steps that every process finished: slowest time, losses of the last rank that has them."""
        merged = []
        for rows in zip(*(process.steps for process in self.processes), strict=False):
            norms = (row["grad_norm"] for row in reversed(rows) if row["grad_norm"] is not None)
            merged.append(
                {
                    "iteration": rows[0]["iteration"],
                    "measured": rows[0]["measured"],
                    "seconds": max(row["seconds"] for row in rows),
                    "loss": next((row["loss"] for row in reversed(rows) if row["loss"]), {}),
                    "grad_norm": next(norms, None),
                }
            )
        return merged

    @property
    def measured_seconds(self) -> list[float]:
        return [step["seconds"] for step in self.steps if step["measured"]]

    @property
    def median_step(self) -> float | None:
        return statistics.median(measured) if (measured := self.measured_seconds) else None

    @property
    def first_step(self) -> float | None:
        """Seconds from process start to the end of the first step."""
        times = [process.steps[0]["time"] for process in self.processes if process.steps]
        return max(times) - self.launched if times else None

    @property
    def peaks(self) -> list[int]:
        return [process.peak for process in self.processes if process.steps]


def run(
    job: Job, arm: Arm, repeat: int, *, profile: bool = False, trace: Path | None = None,
    progress: Callable[[int], None] = lambda steps: None,
) -> Outcome:  # fmt: skip
    """Run the command once in fresh processes. KeyboardInterrupt ends it and propagates."""
    slug = "".join(letter if letter.isalnum() or letter in "+_-" else "-" for letter in arm.name)
    folder = job.folder / "runs" / f"{repeat:02d}-{slug[:80]}"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("rank*.jsonl"):
        old.unlink()
    if trace is not None:
        trace.mkdir(parents=True, exist_ok=True)
    log, plan, launched = folder / "log.txt", folder / "plan", time.time()
    RunPlan(job, arm, folder, profile, trace, launched).write(plan)
    outcome = Outcome(arm, repeat, str(log.relative_to(job.folder)), launched)
    with log.open("w") as output:
        started = child_process(
            job.command, terminate, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env=_environment(job, plan),
        )  # fmt: skip
        try:
            with started as process:
                idle = _watch(process, folder, job, progress)
        except OSError as error:
            outcome.status, outcome.reason = "crashed", f"{job.command[0]}: {error.strerror}"
            return outcome
    outcome.seconds, outcome.exit_code = time.time() - launched, process.returncode
    outcome.processes = read(folder)
    outcome.status, outcome.reason = _status(outcome, idle, job)
    if outcome.status != "ok":
        outcome.log_tail = log.read_text(errors="replace").splitlines()[-_TAIL:]
    return outcome


def _status(outcome: Outcome, idle: float, job: Job) -> tuple[str, str | None]:
    steps, code = len(outcome.steps), outcome.exit_code
    has_ended = _have_ended(outcome.processes)
    # The process counts from its step, this one from when it saw it.
    if idle >= 0.9 * job.timeout and not has_ended:
        where = f"after step {steps}" if steps else "before its first step"
        return "hung", f"no progress for {job.timeout:.0f} s {where}; every thread's stack is at the end of its log"
    if code and not (has_ended and idle >= min(_MOST_TO_END, job.timeout)):
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        out_of_memory = " (out of memory?)" * (code == -signal.SIGKILL)
        return "crashed", f"{how}{out_of_memory} after {steps} steps"
    if not steps and outcome.processes:
        return "no steps", "Megatron was imported, but it ended without a training step"
    if not steps:
        return "no steps", (
            "it ended without a training step of Megatron that could be seen: the command must start "
            "megatron.training's pretrain, in Python processes that read PYTHONPATH"
        )
    if len(outcome.measured_seconds) < 2:
        return "no steps", (
            f"it trained for {steps} steps, and {job.warmup} of warm-up and 2 measured ones are needed: "
            "raise --train-iters of the command or lower --warmup"
        )
    return "ok", None


def _have_ended(processes: list[Process]) -> bool:
    return bool(processes) and all(process.end is not None for process in processes)


def _watch(process: subprocess.Popen[bytes], folder: Path, job: Job, progress: Callable[[int], None]) -> float:
    """Wait for the command, or until it is hung; seconds since its last step."""
    seen, since = -1, time.monotonic()
    while process.poll() is None:
        found = read(folder)
        steps = min((len(each.steps) for each in found), default=0)
        if steps != seen:
            seen, since = steps, time.monotonic()
            progress(steps)
        limit = min(_MOST_TO_END, job.timeout) if _have_ended(found) else job.timeout + _GRACE
        if time.monotonic() - since > limit:
            break
        time.sleep(_POLL)
    return time.monotonic() - since


def read(folder: Path) -> list[Process]:
    chosen: dict[int, Process] = {}
    for path in sorted(folder.glob("rank*.jsonl")):
        process = Process(int(path.stem.removeprefix("rank").partition("-")[0]))
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # unfinished line
                entry = json.loads(line)
                kind = entry.pop("kind")
                if kind == "step":
                    process.steps.append(entry)
                else:
                    setattr(process, kind, entry)
        best = chosen.setdefault(process.rank, process)
        if len(process.steps) > len(best.steps):
            chosen[process.rank] = process
    training = [process for process in chosen.values() if process.steps]
    return sorted(training or chosen.values(), key=lambda process: process.rank)


def _environment(job: Job, plan: Path) -> dict[str, str]:
    changed = {**os.environ, VARIABLE: str(plan)}
    changed["PYTHONPATH"] = os.pathsep.join([str(_INJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Buffered output would follow the error that ended a run.
    changed.setdefault("PYTHONUNBUFFERED", "1")
    if job.allocator:
        changed["MINDSPEED_LITE_ALLOCATOR"] = job.allocator
    changed.setdefault("MASTER_ADDR", "127.0.0.1")
    changed.setdefault("MASTER_PORT", "0")  # any free port, of a single process
    return changed


__all__ = ["Arm", "Job", "Outcome", "Process", "run"]
