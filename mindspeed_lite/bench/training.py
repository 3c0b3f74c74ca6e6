"""The whole benchmark of a training command: off and on in alternation, a rounding baseline if needed, the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mindspeed_lite.bench import compose, harness, output
from mindspeed_lite.bench.harness import Job, Outcome
from mindspeed_lite.bench.plan import Arm, arms_for

OFF = Arm("off", "off")


class BenchError(RuntimeError):
    """The benchmark cannot begin; the text says why and what to do."""


@dataclass(frozen=True)
class Request:
    """What the user asked for.

    Attributes:
        mode: `features`, `each`, `all` or `noise`; see `arms_for`.
        features: names, for mode `features`; empty: what the command turns on itself.
        beside: features that are on in every arm, off too.
        rounding_baseline: `auto`, `float32`, `order` or `none`.
    """

    job: Job
    mode: str
    features: tuple[str, ...]
    beside: tuple[str, ...]
    repeats: int
    rounding_baseline: str
    profile: bool
    trace: bool
    title: str


@dataclass
class Progress:
    """Where a benchmark stands, to be shown."""

    run: int = 0
    runs: int | None = None
    arm: str = ""
    repeat: int = 0
    steps: int = 0
    of_steps: int = 0
    note: str = ""


@dataclass
class Benchmark:
    """A benchmark under way; `report()` tells what is known so far, at any time."""

    request: Request
    show: Callable[[Progress], None] = lambda progress: None
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    outcomes: list[Outcome] = field(default_factory=list)
    ceiling: dict[str, Any] | None = None
    complete: bool = False
    _broken: set[str] = field(default_factory=set)
    _progress: Progress = field(default_factory=Progress)

    def run(self) -> None:
        """Run everything; on KeyboardInterrupt what is finished stays in the report.

        Raises:
            BenchError: off does not run, or no feature is there to compare it with.
        """
        first = self._run(OFF, 1, last=self.request.repeats == 1)
        if first.status != "ok":
            raise BenchError(f"the command does not run with features off: {first.reason}")
        arms = self._arms(first)
        extra = int(self.request.rounding_baseline != "none")
        self._progress.runs = self.request.repeats * (1 + len(arms)) + extra
        self._measure_ceiling(first)
        for repeat in range(1, self.request.repeats + 1):
            last = repeat == self.request.repeats
            if repeat > 1:
                self._run(OFF, repeat, last)
                self._measure_ceiling(first)
            for arm in arms:
                if arm.name not in self._broken:
                    self._run(arm, repeat, last)
        self._run_rounding_baseline()
        self.complete = True

    def report(self) -> dict[str, Any]:
        """The report of what is finished (see docs/bench-report.md)."""
        request = self.request
        return compose.report(
            self.outcomes,
            title=request.title,
            created=self.created,
            command=request.job.command,
            complete=self.complete,
            ceiling=self.ceiling,
            settings={
                "repeats": request.repeats,
                "warmup": request.job.warmup,
                "steps": request.job.steps,
                "timeout": request.job.timeout,
                "mode": request.mode,
                "beside": list(request.beside),
                "rounding_baseline": request.rounding_baseline,
                "allocator": request.job.allocator or "as the command has it",
            },
        )

    def _run(self, arm: Arm, repeat: int, last: bool) -> Outcome:
        arm = replace(arm, beside=self.request.beside)
        shown = last and arm.role != "rounding_baseline"
        profile = shown and self.request.profile
        trace = self.request.job.folder / "trace" / arm.name if shown and self.request.trace else None
        self._progress.run += 1
        self._progress.arm, self._progress.repeat, self._progress.note = arm.name, repeat, ""
        self._progress.of_steps = self.request.job.warmup + self.request.job.steps + profile

        def progress(steps: int) -> None:
            self._progress.steps = max(steps, 0)
            self.show(self._progress)

        progress(0)
        try:
            outcome = harness.run(self.request.job, arm, repeat, profile=profile, trace=trace, progress=progress)
        except KeyboardInterrupt:
            self._broken.add(arm.name)
            raise
        if outcome.status != "ok":
            self._broken.add(arm.name)
            self._progress.note = f"{arm.name}: {outcome.status}: {outcome.reason}"
            self.show(self._progress)
        self.outcomes.append(outcome)
        return outcome

    def _arms(self, first: Outcome) -> list[Arm]:
        request = self.request
        told = next((process.run for process in first.processes if process.run), {}) or {}
        given: list[str] = told.get("given", [])
        if request.mode == "features" and not request.features and not given:
            return arms_for("all", ())
        if request.mode != "each":
            return arms_for(request.mode, request.features)
        applicable = [name for name, reasons in told.get("applicable", {}).items() if not reasons or name in given]
        if not applicable:
            reasons = "; ".join(f"{name}: {', '.join(why)}" for name, why in told.get("applicable", {}).items())
            raise BenchError(f"no feature applies to this training: {reasons}")
        return arms_for("each", applicable)

    def _run_rounding_baseline(self) -> None:
        """A third training for what promises the same mathematics and gives other bits."""
        wanted = self.request.rounding_baseline
        if wanted == "none" or not compose.needs_rounding_baseline(self.outcomes):
            return
        kinds = {"float32": ["float32"], "order": ["other order"]}.get(wanted)
        if kinds is None:
            sixteen = compose.dtype(self.outcomes) != "fp32"
            kinds = ["float32", "other order"] if sixteen else ["other order"]
        for kind in kinds:
            arm = Arm(f"rounding baseline, {kind}", "off", arithmetic=kind)  # type: ignore[arg-type]
            if self._run(arm, 1, last=False).status == "ok":
                break

    def _measure_ceiling(self, first: Outcome) -> None:
        """What a large matrix product reaches with the processes' threads; in a process of its own.

        Measured again beside later runs, and the most counts: a machine is not equally fast all the time.
        """
        told = next((process.run for process in first.processes if process.run), None)
        if told is None:
            return
        self._progress.note = "measuring the ceiling"
        self.show(self._progress)
        environment = told["environment"]
        command = [
            sys.executable, "-m", "mindspeed_lite.bench.ceiling", "--dtype", told["model"]["dtype"],
            "--threads", str(environment["threads"]), "--device", environment["device_type"],
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ))
            found = json.loads(done.stdout) if done.returncode == 0 else None
        except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError):
            found = None
        self.ceiling = compose.higher_ceiling(self.ceiling, found)


def check_features(names: Sequence[str]) -> None:
    """Whether these features exist.

    Raises:
        BenchError: one does not; the text names the closest ones.
    """
    import difflib

    from mindspeed_lite import runtime

    known = [feature.name for feature in runtime.catalogue()]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise BenchError(f"there is no feature {name!r}; {hint} (see mindspeed-lite features)")


def prepare_folder(folder: Path) -> None:
    """Make the output folder.

    Raises:
        BenchError: it cannot be written, or holds something that is no earlier report.
    """
    try:
        output.check_writable(folder)
    except (OSError, ValueError, RuntimeError) as error:
        raise BenchError(str(error)) from error
