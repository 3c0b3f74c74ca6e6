"""Maps `torch.cuda` names that torch_npu's `transfer_to_npu` leaves on CUDA.

Missing gauges read 0 and profiler switches do nothing, logged once. Mappings of later torch_npu releases win.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from .redirect import NO_CUDA_EXTENSION, Redirects

_log = logging.getLogger("mindspeed_lite")
_thread = threading.local()


def install(redirects: Redirects) -> None:
    redirects.default_environment(*NO_CUDA_EXTENSION)
    cuda, npu = torch.cuda, torch.npu  # type: ignore[attr-defined]
    starts = "--profile starts nsys, which sees nothing on an NPU (add --use-pytorch-profiler)"
    cudart = SimpleNamespace(cudaProfilerStart=lambda: _zero(starts), cudaProfilerStop=lambda: 0)
    answers: dict[str, Callable[..., Any]] = {
        "device_memory_used": _memory_used,
        "cudart": lambda: cudart,
        "check_error": lambda result: None,
    }
    for gauge in ("temperature", "power_draw", "clock_rate"):
        text = f"torch_npu has no gauge for {gauge.replace('_', ' ')}: 0 is reported (npu-smi shows it)"
        answers[gauge] = functools.partial(_zero, text)
    markers = {
        "range_push": _range_push,
        "range_pop": _range_pop,
        "range_start": lambda msg: npu.mstx.range_start(msg),
        "range_end": lambda range_id: npu.mstx.range_end(range_id),
        "mark": lambda msg: npu.mstx.mark(msg),
    }
    for owner, replacements in ((cuda, answers), (cuda.nvtx, markers)):
        for name, replacement in replacements.items():
            if getattr(getattr(owner, name, None), "__module__", "").startswith("torch.cuda"):
                redirects.set(owner, name, replacement)
    # Megatron's random streams read the device's generators; torch_npu before 2.10 has none here.
    npu._lazy_call(lambda: redirects.set(cuda, "default_generators", npu.default_generators))
    # It uses the CUDA profiler.
    redirects.set(torch.autograd.profiler, "emit_nvtx", lambda *_, **__: contextlib.nullcontext())


def _memory_used(device: Any = None) -> int:
    free, total = torch.npu.mem_get_info(device)  # type: ignore[attr-defined]
    return int(total - free)


def _zero(reason: str, device: Any = None) -> int:
    _warn_once(reason)
    return 0


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning(text)


def _range_push(msg: str) -> int:
    """Begin a range of this thread by mstx, which identifies ranges by number; return its depth."""
    _open_ranges().append(torch.npu.mstx.range_start(msg))  # type: ignore[attr-defined]
    return len(_open_ranges()) - 1


def _range_pop() -> int:
    """End the innermost range; return open ranges, -1 if there was none, as CUDA does."""
    if not _open_ranges():
        return -1
    torch.npu.mstx.range_end(_open_ranges().pop())  # type: ignore[attr-defined]
    return len(_open_ranges())


def _open_ranges() -> list[Any]:
    found: list[Any] = _thread.__dict__.setdefault("ranges", [])
    return found
