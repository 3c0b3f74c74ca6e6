"""Maps `torch.cuda` names that torch_npu's `transfer_to_npu` leaves on CUDA.

Missing gauges read 0 and profiler switches do nothing, logged once. Mappings of later torch_npu releases win.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from .redirect import NO_CUDA_EXTENSION, Redirects

GAUGES = ("temperature", "power_draw", "clock_rate")

_log = logging.getLogger("mindspeed_lite")


def install(redirects: Redirects) -> None:
    redirects.default_environment(*NO_CUDA_EXTENSION)
    cuda = torch.cuda
    answers: dict[str, Callable[..., Any]] = {
        "device_memory_used": _memory_used,
        "cudart": _Cudart,
        "check_error": lambda result: None,
        **{name: functools.partial(_no_gauge, name) for name in GAUGES},
    }
    for name, answer in answers.items():
        if _means_cuda(cuda, name):
            redirects.set(cuda, name, answer)
    markers = _Markers()
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        if _means_cuda(cuda.nvtx, name):
            redirects.set(cuda.nvtx, name, getattr(markers, name))
    # Megatron's random streams read the device's generators; torch_npu before 2.10 has none here.
    _npu()._lazy_call(lambda: redirects.set(cuda, "default_generators", _npu().default_generators, shared=True))
    # It uses the CUDA profiler.
    redirects.set(torch.autograd.profiler, "emit_nvtx", lambda *_, **__: contextlib.nullcontext())


def _means_cuda(owner: Any, name: str) -> bool:
    return getattr(getattr(owner, name, None), "__module__", "").startswith("torch.cuda")


def _npu() -> Any:
    return importlib.import_module("torch").npu


def _memory_used(device: Any = None) -> int:
    free, total = _npu().mem_get_info(device)
    return int(total - free)


@functools.cache
def _say(text: str) -> None:
    _log.warning(text)


def _no_gauge(name: str, device: Any = None) -> int:
    _say(f"torch_npu has no gauge for {name.replace('_', ' ')}: 0 is reported (npu-smi shows it)")
    return 0


class _Cudart:
    """CUDA runtime whose profiler calls do nothing."""

    def cudaProfilerStart(self) -> int:
        _say("--profile starts nsys, which sees nothing on an NPU (add --use-pytorch-profiler)")
        return 0

    def cudaProfilerStop(self) -> int:
        return 0


class _Markers:
    """`torch.cuda.nvtx` on mstx, which identifies ranges by number."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def range_push(self, msg: str) -> int:
        open_ranges = self._open()
        open_ranges.append(self.range_start(msg))
        return len(open_ranges) - 1

    def range_pop(self) -> int:
        """End the innermost range; return open ranges, -1 if there was none, as CUDA does."""
        open_ranges = self._open()
        if open_ranges:
            self.range_end(open_ranges.pop())
            return len(open_ranges)
        return -1

    def range_start(self, msg: str) -> int:
        return int(_npu().mstx.range_start(msg) or 0)

    def range_end(self, range_id: int) -> None:
        _npu().mstx.range_end(range_id)

    def mark(self, msg: str) -> None:
        _npu().mstx.mark(msg)

    def _open(self) -> list[int]:
        found: list[int] = self._of_thread.__dict__.setdefault("ranges", [])
        return found
