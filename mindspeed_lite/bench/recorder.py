"""Times training steps in a process and writes JSON lines.

Lines of `rank<R>-<pid>.jsonl`: `run` (model, device, features), `step` (time, losses, gradient norm, memory),
`breakdown` (profiled step), `end` (fallbacks, counted memory).
"""

from __future__ import annotations

import contextlib
import faulthandler
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
from mindspeed_lite.bench.plan import RunPlan
from mindspeed_lite.bench.probes import profiler_ranges, train_step
from mindspeed_lite.bench.probes.memory import MemoryProbe
from mindspeed_lite.bench.rounding_baseline import ReversedReductionOrder, SampleRandomInDtype
from mindspeed_lite.platform import process_memory

# Approximate bytes of a small Python object.
_OBJECT = 64
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
        self._base = self._peak = 0
        self._live_base: int | None = 0
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
        if _is_cpu():
            process_memory.reset_peak()
            self._base, self._live_base = process_memory.resident(), _held()
        if self.plan.arm.arithmetic == "float32" and precision in _DTYPES:
            self._building.enter_context(SampleRandomInDtype(_DTYPES[precision]))

    def step(self, run: Callable[[], Any]) -> Any:
        if self._number == 0:
            self._begin()
        self._number += 1
        is_profiled = self.plan.profile and self._number == self._last
        began = time.perf_counter()
        result = self._profiled(run) if is_profiled else self._timed(run)
        seconds = time.perf_counter() - began
        losses, grad_norm = train_step.read(result)
        memory = (process_memory.resident() if _is_cpu() else torch.cuda.memory_allocated()) - self._base
        if not is_profiled:
            peak = process_memory.peak_resident() if _is_cpu() else torch.cuda.max_memory_allocated()
            self._peak = max(self._peak, peak - self._base)
        self._write(
            "step",
            iteration=self._number,
            seconds=seconds,
            measured=not is_profiled and self._number > self.plan.job.warmup,
            loss=losses,
            grad_norm=grad_norm,
            live_bytes=_live(self._live_base, memory),
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
        active, device = runtime.current(), platform.activate()
        kind = "growth of the process's resident memory since before the model was built"
        self._write(
            "run",
            model=train_step.model(),
            environment=environment.describe(device),
            memory_kind=kind if _is_cpu() else "largest total of the device allocator",
            given=self._given,
            applicable=runtime.applicable(active) if active is not None else {},
            report=runtime.full_report(active).as_dict() if active is not None else None,
        )

    def _timed(self, run: Callable[[], Any]) -> Any:
        is_reversed = self.plan.arm.arithmetic == "other order"
        with ReversedReductionOrder() if is_reversed else contextlib.nullcontext():  # type: ignore[no-untyped-call, unused-ignore]
            result = run()
        if not _is_cpu():
            torch.cuda.synchronize()
        return result

    def _profiled(self, run: Callable[[], Any]) -> Any:
        trace = self.plan.trace / f"rank{self._rank}.json" if self.plan.trace else None
        with contextlib.ExitStack() as stack:
            stack.callback(profiler_ranges.install())
            result, found = breakdown.profile(run, trace)
        self._write("breakdown", **found)
        return result


def _is_cpu() -> bool:
    current = platform.current()
    return current is None or current.name == "cpu"


def _live(base: int | None, memory: int) -> int | None:
    """Bytes in use, for leak detection; None under another allocator.

    Resident memory also grows until the heap fits all temporaries.
    """
    if not _is_cpu():
        return memory
    held = _held()
    return None if held is None or base is None or held - base < memory // 2 else held - base


def _held() -> int | None:
    """Bytes of malloc, Python's small objects, and shared memory."""
    found = process_memory.handed_out()
    return None if found is None else found + _OBJECT * sys.getallocatedblocks() + process_memory.shared()
