"""Runs the user's command for one arm and collects its measurements."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mindspeed_lite
from mindspeed_lite.bench import records
from mindspeed_lite.bench.plan import VARIABLE, Arm, Plan
from mindspeed_lite.bench.records import Process
from mindspeed_lite.child_process import child_process, terminate

_INJECT = Path(__file__).parent / "inject"
_ROOT = Path(mindspeed_lite.__file__).parent.parent

_POLL = 0.25  # seconds
_MOST_TO_END = 60.0  # seconds from the last step to the end
_TAIL = 40


@dataclass(frozen=True)
class Job:
    """The user's command and how to run it; see also `Plan`.

    Attributes:
        timeout: seconds without a step after which a run is hung.
        environment: added to this process's.
    """

    command: tuple[str, ...]
    folder: Path
    warmup: int
    steps: int
    timeout: float
    allocator: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    memory: bool = False
    beside: tuple[str, ...] = ()


@dataclass
class Outcome:
    """A finished run; `status` is ok, crashed, hung or no steps."""

    arm: Arm
    repeat: int
    status: str
    reason: str | None
    log: str
    seconds: float
    exit_code: int | None
    processes: list[Process]
    launched: float
    log_tail: list[str] = field(default_factory=list)

    @property
    def run(self) -> dict[str, Any] | None:
        """Environment, model and features of the first training process."""
        return next((process.run for process in self.processes if process.run), None)

    @property
    def steps(self) -> list[dict[str, Any]]:
        return records.merged_steps(self.processes)

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
        return [process.steps[-1]["peak_memory_bytes"] for process in self.processes if process.steps]


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
    plan = Plan(
        arm=arm, records=str(folder), warmup=job.warmup, steps=job.steps, profile=profile, trace=str(trace or ""),
        allocator=job.allocator, package_root=str(_ROOT), memory=job.memory, beside=job.beside,
    )  # fmt: skip
    plan.write(folder / "plan.json")
    log = folder / "log.txt"
    outcome = Outcome(arm, repeat, "ok", None, str(log.relative_to(job.folder)), 0.0, None, [], time.time())
    with log.open("w") as output, held_port() as port, contextlib.ExitStack() as stack:
        started = child_process(
            job.command, end=partial(_end, folder=folder), stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, env=_environment(job, folder / "plan.json", port),
        )  # fmt: skip
        try:
            process = stack.enter_context(started)
        except OSError as error:
            outcome.status, outcome.reason = "crashed", f"{job.command[0]}: {error.strerror}"
            return outcome
        hung = _watch(process, folder, job, progress)
    outcome.seconds, outcome.exit_code = time.time() - outcome.launched, process.returncode
    outcome.processes = records.read(folder)
    _set_status(outcome, hung, job)
    if outcome.status != "ok":
        outcome.log_tail = log.read_text(errors="replace").splitlines()[-_TAIL:]
    return outcome


def _set_status(outcome: Outcome, hung: str | None, job: Job) -> None:
    has_ended = bool(outcome.processes) and all(process.end is not None for process in outcome.processes)
    steps, code = outcome.steps, outcome.exit_code
    if hung and not has_ended:
        outcome.status, outcome.reason = "hung", hung
    elif code and not (hung and has_ended):
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if code == -signal.SIGKILL:
            how += " (out of memory?)"
        outcome.status, outcome.reason = "crashed", f"{how} after {len(steps)} steps"
    elif not steps:
        outcome.status = "no steps"
        outcome.reason = (
            "Megatron was imported, but it ended without a training step"
            if outcome.processes
            else "it ended without a training step of Megatron that could be seen: the command must start "
            "megatron.training's pretrain, in Python processes that read PYTHONPATH"
        )
    elif len(outcome.measured_seconds) < 2:
        outcome.status = "no steps"
        outcome.reason = (
            f"it trained for {len(steps)} steps, and {job.warmup} of warm-up and 2 measured ones are needed: "
            "raise --train-iters of the command or lower --warmup"
        )


def _watch(process: subprocess.Popen[bytes], folder: Path, job: Job, progress: Callable[[int], None]) -> str | None:
    seen, since = -1, time.monotonic()
    while process.poll() is None:
        found = records.read(folder)
        steps = min((len(each.steps) for each in found), default=0)
        if steps != seen:
            seen, since = steps, time.monotonic()
            progress(steps)
        has_ended = bool(found) and all(each.end is not None for each in found)
        limit = min(_MOST_TO_END, job.timeout) if has_ended else job.timeout
        if time.monotonic() - since > limit:
            # Training processes write their stacks into the log.
            for pid in records.pids(folder):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGUSR2)
            time.sleep(1.0)
            where = f"after step {seen}" if seen else "before its first step"
            return f"no progress for {limit:.0f} s {where}; every thread's stack is at the end of its log"
        time.sleep(_POLL)
    return None


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    terminate(process)
    # Workers may have their own sessions; their environment names the plan.
    mark = f"{VARIABLE}={folder / 'plan.json'}".encode()
    for pid in records.pids(folder):
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, signal.SIGKILL)


def _environment(job: Job, plan: Path, port: int) -> dict[str, str]:
    changed = {**os.environ, **job.environment, VARIABLE: str(plan)}
    changed["PYTHONPATH"] = os.pathsep.join([str(_INJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Buffered output would follow the error that ended a run.
    changed.setdefault("PYTHONUNBUFFERED", "1")
    if job.allocator:
        changed["MINDSPEED_LITE_ALLOCATOR"] = job.allocator
    changed.setdefault("MASTER_ADDR", "127.0.0.1")
    changed.setdefault("MASTER_PORT", str(port))
    return changed


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Reserve a port; torch's store can still listen there because it reuses addresses."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield int(held.getsockname()[1])


__all__ = ["Job", "Outcome", "held_port", "run"]
