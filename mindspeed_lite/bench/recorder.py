"""Times training steps in a process and writes JSON lines.

Lines of `rank<R>-<pid>.jsonl`: `run` (model, device, features), `step` (time, losses, gradient norm, memory),
`breakdown` (profiled step), `end` (fallbacks, counted memory).
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mindspeed_lite import platform, runtime
from mindspeed_lite.bench import breakdown, environment
from mindspeed_lite.bench.plan import RunPlan
from mindspeed_lite.bench.probes import profiler_ranges, train_step
from mindspeed_lite.bench.probes.memory import MemoryProbe
from mindspeed_lite.bench.rounding_baseline import ReversedReductionOrder, SampleRandomInDtype
from mindspeed_lite.platform import process_memory

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Recorder:
    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self.memory = MemoryProbe() if plan.job.memory else None
        self._rank = int(os.environ.get("RANK", "0"))
        path = Path(plan.records, f"rank{self._rank}-{os.getpid()}.jsonl")
        self._file = path.open("a", buffering=1)
        self._number = 0
        self._last = plan.job.warmup + plan.job.steps + plan.profile
        self._device = platform.activate()
        self._is_cpu = self._device.name == "cpu"
        self._base = self._peak = 0
        self._given: list[str] = []
        self._building = contextlib.ExitStack()
        self._end_if_hung(since=plan.launched)

    def _end_if_hung(self, since: float) -> None:
        """After the timeout print the stacks of all threads and exit."""
        seconds = since + self.plan.job.timeout - time.time()
        faulthandler.dump_traceback_later(min(max(1.0, seconds), 1e8), exit=True)

    def _write(self, kind: str, **fields: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **fields}) + "\n")

    def arguments_are_final(self, precision: str, given: list[str]) -> None:
        """CPU memory counts from here."""
        self._given = given
        if self._is_cpu:
            process_memory.reset_peak()
            self._base = process_memory.resident()
        if self.plan.arm.arithmetic == "float32" and precision in _DTYPES:
            self._building.enter_context(SampleRandomInDtype(_DTYPES[precision]))

    def step(self, model: list[Any], optimizer: Any, run: Callable[[], Any]) -> Any:
        if self._number == 0:
            self._begin()
        self._number += 1
        is_profiled = self.plan.profile and self._number == self._last
        if self.memory is not None:
            run = functools.partial(self.memory.around, model, optimizer, run)
        began = time.perf_counter()
        result = self._profiled(run) if is_profiled else self._timed(run)
        seconds = time.perf_counter() - began
        losses, grad_norm = train_step.read(result)
        if not is_profiled:
            peak = process_memory.peak_resident() if self._is_cpu else torch.cuda.max_memory_allocated()
            self._peak = max(self._peak, peak - self._base)
        self._write(
            "step",
            iteration=self._number,
            seconds=seconds,
            measured=not is_profiled and self._number > self.plan.job.warmup,
            loss=losses,
            grad_norm=grad_norm,
            peak_memory_bytes=self._peak,
            time=time.time(),
        )
        self._end_if_hung(since=time.time())
        if self._number == self._last:
            faulthandler.cancel_dump_traceback_later()
            active = runtime.current()
            fallbacks = active.session.report.fallbacks if active is not None else []
            texts = [f"{each.feature}: {each.reason}" for each in fallbacks]
            self._write("end", fallbacks=texts, memory=self.memory.counted if self.memory else None)
        return result

    def _begin(self) -> None:
        self._building.close()
        self._last = train_step.stop_after(self._last)
        active = runtime.current()
        kind = "growth of the process's resident memory since before the model was built"
        self._write(
            "run",
            model=train_step.model(),
            environment=environment.describe(self._device),
            memory_kind=kind if self._is_cpu else "largest total of the device allocator",
            given=self._given,
            applicable=runtime.applicable(active) if active is not None else {},
            report=runtime.full_report(active).as_dict() if active is not None else None,
        )

    def _timed(self, run: Callable[[], Any]) -> Any:
        is_reversed = self.plan.arm.arithmetic == "other order"
        with ReversedReductionOrder() if is_reversed else contextlib.nullcontext():  # type: ignore[no-untyped-call, unused-ignore]
            result = run()
        if not self._is_cpu:
            torch.cuda.synchronize()
        return result

    def _profiled(self, run: Callable[[], Any]) -> Any:
        trace = self.plan.trace / f"rank{self._rank}.json" if self.plan.trace else None
        with contextlib.ExitStack() as stack:
            stack.callback(profiler_ranges.install())
            result, found = breakdown.profile(run, trace)
        self._write("breakdown", **found)
        return result
