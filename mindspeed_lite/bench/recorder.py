"""In a training process: times its steps and writes each one down as it ends, one JSON object a line.

The file is `rank<R>-<pid>.jsonl` in the plan's folder, and its lines are of these kinds:

    start    the process is there: pid, rank
    run      once, before the first step: what is trained, where, with which features
    step     one for each step: its time, losses, gradient norm and memory
    profile  the breakdown of the profiled step
    end      after the last step that was asked for: calls that features left to Megatron
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mindspeed_lite import platform, runtime
from mindspeed_lite.bench import breakdown, environment
from mindspeed_lite.bench.plan import Plan
from mindspeed_lite.bench.rounding_baseline import ReversedReductionOrder, SampleRandomInDtype
from mindspeed_lite.platform import process_memory

# Bytes of one of Python's small objects, about.
_OBJECT = 64
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Recorder:
    """The listener of one process; see `mindspeed_lite.bench.probes.train_step`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rank = int(os.environ.get("RANK", "0"))
        path = Path(plan.records) / f"rank{self.rank}-{os.getpid()}.jsonl"
        self._file = path.open("a", buffering=1)
        self._number = 0
        self._last = plan.warmup + plan.steps + plan.profile
        self._baseline = 0
        self._live_baseline: int | None = 0
        self._peak = 0
        self._given: list[str] = []
        self._building = contextlib.ExitStack()
        self._write("start", pid=os.getpid(), rank=self.rank)

    def _write(self, kind: str, **fields: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **fields}) + "\n")

    def arguments_are_final(self, precision: str, given: list[str]) -> None:
        """The model is about to be built: on the CPU, memory counts from here."""
        self._given = given
        if _is_cpu():
            process_memory.reset_peak()
            self._baseline = process_memory.resident()
            self._live_baseline = _held()
        if self.plan.arm.arithmetic == "float32" and precision in _DTYPES:
            self._building.enter_context(SampleRandomInDtype(_DTYPES[precision]))

    def step(self, run: Callable[[], Any]) -> tuple[Any, Callable[[dict[str, float], float | None], None]]:
        """Run one training step; see `Listener.step`."""
        if self._number == 0:
            self._begin()
        self._number += 1
        number = self._number
        profiled = self.plan.profile and number == self._last
        order: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.plan.arm.arithmetic == "other order":
            order = ReversedReductionOrder()  # type: ignore[no-untyped-call, unused-ignore]
        began = time.perf_counter()
        if profiled:
            result = self._profile(run)
        else:
            with order:
                result = run()
            _synchronize()
        seconds = time.perf_counter() - began

        def done(losses: dict[str, float], grad_norm: float | None) -> None:
            memory = _memory() - self._baseline
            if not profiled:
                self._peak = max(self._peak, _peak() - self._baseline)
            self._write(
                "step",
                iteration=number,
                seconds=seconds,
                measured=not profiled and number > self.plan.warmup,
                profiled=profiled,
                loss=losses,
                grad_norm=grad_norm,
                memory_bytes=memory,
                live_bytes=_live(self._live_baseline, memory),
                peak_memory_bytes=self._peak,
                time=time.time(),
            )
            if number == self._last:
                self._write("end", fallbacks=_fallbacks())

        return result, done

    def _begin(self) -> None:
        from mindspeed_lite.bench.probes import train_step

        self._building.close()
        self._last = train_step.stop_after(self._last)
        active, device = runtime.current(), platform.activate()
        self._write(
            "run",
            model=train_step.model(),
            environment=environment.describe(device),
            memory_kind=_memory_kind(),
            given=self._given,
            applicable=runtime.applicable(active) if active is not None else {},
            report=runtime.full_report(active).as_dict() if active is not None else None,
        )

    def _profile(self, run: Callable[[], Any]) -> Any:
        from mindspeed_lite.bench.probes import profiler_ranges

        remove = profiler_ranges.install()
        try:
            trace = Path(self.plan.trace) / f"rank{self.rank}.json" if self.plan.trace else None
            result, found = breakdown.profile(run, trace)
        finally:
            remove()
        self._write("profile", breakdown=found)
        return result


def _fallbacks() -> list[str]:
    active = runtime.current()
    return [f"{each.feature}: {each.reason}" for each in active.session.report.fallbacks] if active is not None else []


def _is_cpu() -> bool:
    current = platform.current()
    return current is None or current.name == "cpu"


def _synchronize() -> None:
    if not _is_cpu():
        torch.cuda.synchronize()


def _memory() -> int:
    return process_memory.resident() if _is_cpu() else int(torch.cuda.memory_allocated())


def _live(baseline: int | None, memory: int) -> int | None:
    """Bytes that are held, of which a leak is a growing part; None where that is not known.

    Resident memory grows for some steps without one, until the heap has found room for everything that comes and goes.
    """
    if not _is_cpu():
        return memory
    now = _held()
    if now is None or baseline is None or now - baseline < memory // 2:
        return None  # another allocator has most of it
    return now - baseline


def _held() -> int | None:
    """What malloc has handed out, Python's small objects, which it hands out itself, and memory that is shared."""
    found = process_memory.handed_out()
    return None if found is None else found + _OBJECT * sys.getallocatedblocks() + process_memory.shared()


def _peak() -> int:
    return process_memory.peak_resident() if _is_cpu() else int(torch.cuda.max_memory_allocated())


def _memory_kind() -> str:
    if _is_cpu():
        return "growth of the process's resident memory since before the model was built"
    return "largest total of the device allocator"
