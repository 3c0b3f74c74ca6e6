"""Names of `torch.cuda` that Megatron uses and that torch_npu's `transfer_to_npu` leaves on CUDA.

There they raise, since torch for an NPU is built without CUDA. Here markers become those of Ascend's profilers (mstx)
and memory in use that of the device. Three gauges of `--log-straggler` have no counterpart in torch_npu and read 0; the
switches of `--profile`, which are for nsys, do nothing; both is logged once. A name that a later torch_npu maps is left
to it.
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
    """Give each such name its meaning on the NPU."""
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
    # Megatron's random streams take the device's generators from here; torch_npu before 2.10 leaves none.
    _npu()._lazy_call(lambda: redirects.set(cuda, "default_generators", _npu().default_generators, shared=True))
    # It asks the CUDA profiler for a range around every operator of autograd.
    redirects.set(torch.autograd.profiler, "emit_nvtx", lambda *_, **__: contextlib.nullcontext())


def _means_cuda(owner: Any, name: str) -> bool:
    return getattr(getattr(owner, name, None), "__module__", "").startswith("torch.cuda")


def _npu() -> Any:
    return importlib.import_module("torch").npu  # torch_npu adds it


def _memory_used(device: Any = None) -> int:
    """Bytes in use on the device, by whatever process, as on CUDA."""
    free, total = _npu().mem_get_info(device)
    return int(total - free)


@functools.cache
def _say(text: str) -> None:
    _log.warning(text)


def _no_gauge(name: str, device: Any = None) -> int:
    _say(f"torch_npu has no gauge for {name.replace('_', ' ')}: 0 is reported (npu-smi shows it)")
    return 0


class _Cudart:
    """Stands for the CUDA runtime where profilers start and stop."""

    def cudaProfilerStart(self) -> int:
        _say("--profile starts nsys, which sees nothing on an NPU (add --use-pytorch-profiler)")
        return 0

    def cudaProfilerStop(self) -> int:
        return 0


class _Markers:
    """The functions of `torch.cuda.nvtx` on Ascend's markers, which are ranges that one begins and ends by number."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def range_push(self, msg: str) -> int:
        """Begin a range inside those that are open; returns how many those are."""
        open_ranges = self._open()
        open_ranges.append(self.range_start(msg))
        return len(open_ranges) - 1

    def range_pop(self) -> int:
        """End the innermost range; returns how many stay open, -1 where there was none (CUDA's answers)."""
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
