"""Runs the user's command with the plan of an arm, watches that it gets on, and reads what it measured."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mindspeed_lite
from mindspeed_lite.bench import records
from mindspeed_lite.bench.plan import VARIABLE, Arm, Plan
from mindspeed_lite.bench.records import Process
from mindspeed_lite.child_process import child_process, terminate

if TYPE_CHECKING:
    # Imports torch, which the parent process can do without.
    pass

_INJECT = Path(__file__).parent / "inject"
_ROOT = Path(mindspeed_lite.__file__).parent.parent

_POLL = 0.25  # seconds between two looks at a run
_FAREWELL = 60.0  # what a run may take to end after its last step
_TAIL = 40  # lines of a log that go into the report


@dataclass(frozen=True)
class Job:
    """The user's command and how long to run it, the same for every arm.

    Attributes:
        command: argv, untouched.
        folder: where logs and records go.
        timeout: seconds without a new step after which a run counts as hung.
        environment: variables set in every run, on top of this process's.
        memory: whether bytes are counted by what they are for.
    """

    command: tuple[str, ...]
    folder: Path
    warmup: int
    steps: int
    timeout: float
    allocator: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    memory: bool = False


@dataclass
class Outcome:
    """One finished run: what became of it, and what its processes wrote."""

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
    def steps(self) -> list[dict[str, Any]]:
        return records.merged_steps(self.processes)


def run(
    job: Job, arm: Arm, repeat: int, *, profile: bool = False, trace: Path | None = None,
    progress: Callable[[int], None] = lambda steps: None,
) -> Outcome:  # fmt: skip
    """Run the command once in fresh processes; KeyboardInterrupt ends it and passes on."""
    slug = "".join(letter if letter.isalnum() or letter in "+_-" else "-" for letter in arm.name)
    folder = job.folder / "runs" / f"{repeat:02d}-{slug[:80]}"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("rank*.jsonl"):
        old.unlink()
    if trace is not None:
        trace.mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    with log.open("w") as output, held_port() as port:
        launched = time.time()
        plan = Plan(
            arm=arm, records=str(folder), warmup=job.warmup, steps=job.steps, profile=profile,
            trace=str(trace) if trace is not None else "", allocator=job.allocator, launched=launched,
            package_root=str(_ROOT), memory=job.memory,
        )  # fmt: skip
        plan.write(folder / "plan.json")
        started = child_process(
            job.command, end=partial(_end, folder=folder), stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, env=_environment(job, folder / "plan.json", port),
        )  # fmt: skip
        with contextlib.ExitStack() as stack:
            try:
                process = stack.enter_context(started)
            except OSError as error:
                reason = f"{job.command[0]}: {error.strerror}"
                return Outcome(arm, repeat, "crashed", reason, _relative(log, job), 0.0, None, [], launched)
            hung = _watch(process, folder, job, progress)
    outcome = Outcome(
        arm, repeat, "ok", None, _relative(log, job), time.time() - launched, process.returncode,
        records.read(folder), launched,
    )  # fmt: skip
    _judge(outcome, hung, job)
    if outcome.status != "ok":
        outcome.log_tail = log.read_text(errors="replace").splitlines()[-_TAIL:]
    return outcome


def _judge(outcome: Outcome, hung: str | None, job: Job) -> None:
    """Set status and reason from what the run left behind."""
    done = [process.ended for process in outcome.processes]
    steps = outcome.steps
    if hung is not None and not (done and all(done)):
        outcome.status, outcome.reason = "hung", hung
    elif outcome.exit_code and not (hung and done and all(done)):
        code = outcome.exit_code
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if code == -signal.SIGKILL:
            how += " (out of memory?)"
        outcome.status, outcome.reason = "crashed", f"{how} after {len(steps)} steps"
    elif not steps:
        outcome.status = "no steps"
        outcome.reason = (
            "it ended without a training step of Megatron that could be seen: the command must start "
            "megatron.training's pretrain, in Python processes that read PYTHONPATH"
            if not outcome.processes
            else "Megatron was imported, but it ended without a training step"
        )
    elif sum(step["measured"] for step in steps) < 2:
        outcome.status = "no steps"
        outcome.reason = (
            f"it trained for {len(steps)} steps, and {job.warmup} of warm-up and 2 measured ones are needed: "
            "raise --train-iters of the command or lower --warmup"
        )


def _watch(process: subprocess.Popen[bytes], folder: Path, job: Job, progress: Callable[[int], None]) -> str | None:
    """Wait for the end; returns what stood still if the run had to be ended."""
    seen, since = -1, time.monotonic()
    while process.poll() is None:
        found = records.read(folder)
        steps = min((len(each.steps) for each in found), default=0)
        if steps != seen:
            seen, since = steps, time.monotonic()
            progress(steps)
        finished = bool(found) and all(each.ended for each in found)
        limit = min(_FAREWELL, job.timeout) if finished else job.timeout
        if time.monotonic() - since > limit:
            where = f"after step {seen}" if seen else "before its first step"
            _ask_where(folder)
            return f"no progress for {limit:.0f} s {where}; every thread's stack stands at the end of its log"
        time.sleep(_POLL)
    progress(records.progress(folder))
    return None


def _ask_where(folder: Path) -> None:
    """Let every training process write its threads' stacks into the log."""
    for pid in records.pids(folder):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGUSR2)
    time.sleep(1.0)


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """End the run with everything it started: helpers that outlive it would disturb the next one."""
    terminate(process)
    # Launchers may start workers in sessions of their own; those that are still ours carry the plan's name.
    mark = f"{VARIABLE}={folder / 'plan.json'}".encode()
    for pid in records.pids(folder):
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, signal.SIGKILL)


def _environment(job: Job, plan: Path, port: int) -> dict[str, str]:
    changed = {**os.environ, **job.environment, VARIABLE: str(plan)}
    paths = [str(_INJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    changed["PYTHONPATH"] = os.pathsep.join(paths)
    # The log in the order of writing: what ends a run stands at its end, not before what was buffered.
    changed.setdefault("PYTHONUNBUFFERED", "1")
    if job.allocator:
        changed["MINDSPEED_LITE_ALLOCATOR"] = job.allocator
    # A single process without torchrun needs to be told where it meets itself; torchrun tells its own.
    changed.setdefault("MASTER_ADDR", "127.0.0.1")
    changed.setdefault("MASTER_PORT", str(port))
    return changed


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port that no other process gets meanwhile; torch's store, which reuses addresses, may listen there."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield int(held.getsockname()[1])


def _relative(path: Path, job: Job) -> str:
    return str(path.relative_to(job.folder))


__all__ = ["Job", "Outcome", "held_port", "run"]
