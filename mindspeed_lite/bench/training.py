"""Benchmarks a training command: off and on alternate, with a rounding baseline if needed."""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from mindspeed_lite.bench import compose, harness
from mindspeed_lite.bench.harness import Job, Outcome
from mindspeed_lite.bench.plan import Arm

OFF = Arm("off", "off")


class BenchError(RuntimeError):
    """The benchmark cannot begin; the text says why and what to do."""


@dataclass(frozen=True)
class Request:
    """What the user asked for.

    Attributes:
        mode: arms compared with off: `features`, `each`, `all` or `noise`.
        features: for mode `features`; empty: the command's own, or all.
    """

    job: Job
    mode: str
    features: tuple[str, ...]
    repeats: int
    baseline: bool
    profile: bool
    trace: bool
    title: str


@dataclass
class Benchmark:
    """A running benchmark; `report()` holds what is finished.

    show: called with the running arm and its finished steps.
    """

    request: Request
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
        request = self.request
        first = self._run(OFF, 1)
        if first.status != "ok" or first.run is None:
            raise BenchError(f"the command does not run with features off: {first.reason}")
        arms = self._arms(first.run)
        self._planned = request.repeats * (1 + len(arms)) + request.baseline
        self.ceiling = self._measure_ceiling(first.run)
        for repeat in range(1, request.repeats + 1):
            failed = {outcome.arm.name for outcome in self.outcomes if outcome.status != "ok"}
            for arm in arms if repeat == 1 else [OFF, *arms]:
                if arm.name not in failed:
                    self._run(arm, repeat)
        if request.baseline and compose.needs_rounding_baseline(self.report()):
            self._run_rounding_baseline(first.run["model"]["dtype"])
        self.complete = True

    def report(self) -> dict[str, Any]:
        request, job = self.request, self.request.job
        return compose.report(
            self.outcomes,
            title=request.title,
            created=self.created,
            command=job.command,
            complete=self.complete,
            ceiling=self.ceiling,
            settings={
                "repeats": request.repeats,
                "warmup": job.warmup,
                "steps": job.steps,
                "timeout": job.timeout,
                "mode": request.mode,
                "beside": list(job.beside),
                "rounding_baseline": "auto" if request.baseline else "none",
                "allocator": job.allocator or "as the command has it",
            },
        )

    def _run(self, arm: Arm, repeat: int) -> Outcome:
        request = self.request
        is_last = repeat == request.repeats and arm.role != "rounding_baseline"
        trace = request.job.folder / "trace" / arm.name if is_last and request.trace else None
        of = f" of {self._planned}" if self._planned else ""
        what = f"run {len(self.outcomes) + 1}{of}: {arm.name}, repeat {repeat}"
        outcome = harness.run(
            request.job, arm, repeat, profile=is_last and request.profile, trace=trace,
            progress=lambda steps: self.show(what, steps),
        )  # fmt: skip
        if outcome.status != "ok":
            self.show(f"{what}: {outcome.status}: {outcome.reason}", 0)
        self.outcomes.append(outcome)
        return outcome

    def _arms(self, told: dict[str, Any]) -> list[Arm]:
        mode, features, given = self.request.mode, self.request.features, told["given"]
        if mode == "noise":
            return [Arm("off again", "off")]
        if mode == "features" and features:
            return [Arm("+".join(features), "only", features)]
        if mode == "features" and given:
            return [Arm("as given", "given")]
        if mode != "each":
            return [Arm("all", "all")]
        applicable = [name for name, reasons in told["applicable"].items() if not reasons or name in given]
        if not applicable:
            reasons = "; ".join(f"{name}: {', '.join(why)}" for name, why in told["applicable"].items())
            raise BenchError(f"no feature applies to this training: {reasons}")
        together = [Arm("all", "only", tuple(applicable))] if len(applicable) > 1 else []
        return [*(Arm(name, "only", (name,)) for name in applicable), *together]

    def _run_rounding_baseline(self, dtype: str) -> None:
        if dtype != "fp32":
            outcome = self._run(Arm("rounding baseline, float32", "off", arithmetic="float32"), 1)
            if outcome.status == "ok":
                return
        self._run(Arm("rounding baseline, other order", "off", arithmetic="other order"), 1)

    def _measure_ceiling(self, told: dict[str, Any]) -> dict[str, Any] | None:
        self.show("measuring the ceiling", 0)
        environment = told["environment"]
        command = [
            sys.executable, "-m", "mindspeed_lite.bench.ceiling",
            environment["device_type"], told["model"]["dtype"], str(environment["threads"]),
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
            found: dict[str, Any] = json.loads(done.stdout)
        except (OSError, subprocess.SubprocessError, json.JSONDecodeError):
            return None
        return found


def check_features(names: Sequence[str]) -> None:
    """Raise BenchError for an unknown feature; the text names the closest one."""
    from mindspeed_lite import runtime

    known = [feature.name for feature in runtime.catalogue()]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise BenchError(f"there is no feature {name!r}; {hint} (see mindspeed-lite features)")
