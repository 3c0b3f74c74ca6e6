"""Device time and host time of a call, apart.

On CUDA the calls of a round are queued behind a kernel that waits, so that the device runs them without gaps: events
around them give the device's time, and the clock around their issue gives the host's. A call that waits for the device
itself (`.item()`, a size read back) ends the wait early; its round is marked, and its device time includes the host's.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

_ROUNDS = 5
_ROUND_SECONDS = 0.02
_MOST_CALLS = 16  # of a round: the queue of launches is finite
_SPIN_CYCLES = 2_000_000


class Time(NamedTuple):
    """Seconds of a call; waits: the call synchronises with the device."""

    device: float
    host: float
    waits: bool


def measure(steps: Mapping[str, Callable[[], object]], device: str) -> dict[str, Time | str]:
    """The median time of each call, rounds in turns (A B A B); what raises gives its error."""
    found: dict[str, Time | str] = {}
    samples: dict[str, list[Time]] = {}
    calls: dict[str, int] = {}
    sample = _on_cuda if device == "cuda" else _on_cpu
    for name, step in steps.items():
        try:
            for _ in range(2):
                step()
            first = sample(step, 1)
            calls[name] = max(1, min(_MOST_CALLS, int(_ROUND_SECONDS / max(first.device, first.host, 1e-6))))
            samples[name] = []
        except Exception as error:  # a library's own; the page names it
            found[name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    for _ in range(_ROUNDS):
        for name in samples:
            samples[name].append(sample(steps[name], calls[name]))
    for name, each in samples.items():
        device_seconds, host_seconds = (statistics.median(values) for values in list(zip(*each, strict=True))[:2])
        found[name] = Time(device_seconds, host_seconds, any(one.waits for one in each))
    return found


def _on_cpu(step: Callable[[], object], calls: int) -> Time:
    began = time.perf_counter()
    for _ in range(calls):
        step()
    seconds = (time.perf_counter() - began) / calls
    return Time(seconds, seconds, False)


def _on_cuda(step: Callable[[], object], calls: int) -> Time:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    spin = int(_SPIN_CYCLES * (1 + calls))
    torch.cuda.synchronize()
    spun = torch.cuda.Event()
    torch.cuda._sleep(spin)
    spun.record()
    start.record()
    began = time.perf_counter()
    for _ in range(calls):
        step()
    host = (time.perf_counter() - began) / calls
    waits = spun.query()
    end.record()
    torch.cuda.synchronize()
    return Time(start.elapsed_time(end) / 1e3 / calls, host, waits)


def as_figures(found: Mapping[str, Time | str]) -> dict[str, Any]:
    """For JSON."""
    return {name: {"error": each} if isinstance(each, str) else each._asdict() for name, each in found.items()}
