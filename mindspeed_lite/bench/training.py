"""Benchmarks a training command: off and on alternate, with a rounding baseline if needed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from mindspeed_lite.bench import compose, harness
from mindspeed_lite.bench.harness import Arm, Job, Outcome

OFF = Arm("off", "off")


class BenchError(RuntimeError):
    """The benchmark cannot begin; the text says why and what to do."""


@dataclass
class Benchmark:
    """A running benchmark; `report()` holds what is finished.

    Attributes:
        mode: arms compared with off: `features`, `each`, `all` or `noise`.
        features: for mode `features`; empty: the command's own, or all.
        show: called with the running arm and its finished steps.
    """

    job: Job
    title: str
    mode: str = "features"
    features: tuple[str, ...] = ()
    repeats: int = 3
    baseline: bool = True
    profile: bool = True
    trace: bool = False
    show: Callable[[str, int], None] = lambda what, steps: None
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    outcomes: list[Outcome] = field(default_factory=list)
    ceiling: dict[str, Any] | None = None
    complete: bool = False
    _planned: int | None = None

    def run(self) -> None:
        """Run everything; KeyboardInterrupt keeps finished runs.

        Raises:
            BenchError: off does not run, or no feature applies.
        """
        first = self._run(OFF, 1)
        if first.status != "ok" or first.run is None:
            raise BenchError(f"the command does not run with features off: {first.reason}")
        arms = self._arms(first.run)
        self._planned = self.repeats * (1 + len(arms)) + self.baseline
        self.ceiling = self._measure_ceiling(first.run)
        for repeat in range(1, self.repeats + 1):
            failed = {outcome.arm.name for outcome in self.outcomes if outcome.status != "ok"}
            for arm in arms if repeat == 1 else [OFF, *arms]:
                if arm.name not in failed:
                    self._run(arm, repeat)
        if self.baseline and compose.needs_rounding_baseline(self.report()):
            self._run_rounding_baseline(first.run["model"]["dtype"])
        self.complete = True

    def report(self) -> dict[str, Any]:
        job = self.job
        settings = {
            "repeats": self.repeats,
            "warmup": job.warmup,
            "steps": job.steps,
            "timeout": job.timeout,
            "mode": self.mode,
            "beside": list(job.beside),
            "rounding_baseline": "auto" if self.baseline else "none",
            "allocator": job.allocator or "as the command has it",
        }
        return compose.report(
            self.outcomes, self.complete, self.ceiling,
            created=self.created, title=self.title, command=list(job.command), settings=settings,
        )  # fmt: skip

    def _run(self, arm: Arm, repeat: int) -> Outcome:
        is_last = repeat == self.repeats and arm.role != "rounding_baseline"
        trace = self.job.folder / "trace" / arm.name if is_last and self.trace else None
        of = f" of {self._planned}" if self._planned else ""
        what = f"run {len(self.outcomes) + 1}{of}: {arm.name}, repeat {repeat}"
        self.show(what, 0)
        outcome = harness.run(
            self.job, arm, repeat, profile=is_last and self.profile, trace=trace,
            progress=lambda steps: self.show(what, steps),
        )  # fmt: skip
        if outcome.status != "ok":
            self.show(f"{what}: {outcome.status}: {outcome.reason}", 0)
        self.outcomes.append(outcome)
        return outcome

    def _arms(self, described: dict[str, Any]) -> list[Arm]:
        given = described["given"]
        if self.mode == "noise":
            return [Arm("off again", "off")]
        if self.mode == "features" and self.features:
            return [Arm("+".join(self.features), "only", self.features)]
        if self.mode == "features" and given:
            return [Arm("as given", "given")]
        if self.mode != "each":
            return [Arm("all", "all")]
        why = described["applicable"]
        applicable = [name for name, reasons in why.items() if not reasons or name in given]
        if not applicable:
            reasons = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in why.items())
            raise BenchError(f"no feature applies to this training: {reasons}")
        together = [Arm("all", "only", tuple(applicable))] if len(applicable) > 1 else []
        return [*(Arm(name, "only", (name,)) for name in applicable), *together]

    def _run_rounding_baseline(self, dtype: str) -> None:
        if dtype != "fp32":
            outcome = self._run(Arm("rounding baseline, float32", "off", arithmetic="float32"), 1)
            if outcome.status == "ok":
                return
        self._run(Arm("rounding baseline, other order", "off", arithmetic="other order"), 1)

    def _measure_ceiling(self, described: dict[str, Any]) -> dict[str, Any] | None:
        self.show("measuring the ceiling", 0)
        environment, dtype = described["environment"], described["model"]["dtype"]
        arguments = [environment["device_type"], dtype, str(environment["threads"])]
        command = [sys.executable, "-m", "mindspeed_lite.bench.ceiling", *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
            found: dict[str, Any] = json.loads(done.stdout)
        except (OSError, subprocess.SubprocessError, json.JSONDecodeError):
            return None
        return found
