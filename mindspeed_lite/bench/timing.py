"""Times functions interleaved (A B C, A B C, ...), so that disturbances hit all of them.

A sample is a loop of calls, by clock on a CPU, else by device events. Functions are compared by ratios within a round.
"""

from __future__ import annotations

import math
import statistics
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mindspeed_lite.bench.statistics import quantile

CONFIDENCE = 0.95

_MAX_CALLS = 100_000
_MAX_QUEUED_CALLS = 16  # launch queues are finite
_SPIN_CYCLES = 2_000_000
_CYCLES_PER_SECOND = 3e9  # half again as many as a GPU has

Call = Callable[[], object]


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    sample_seconds: minimum per sample. rounds: minimum and maximum; stops between after `seconds`. warmup: uncounted
    calls.
    """

    sample_seconds: float = 0.01
    rounds: tuple[int, int] = (7, 40)
    seconds: float = 2.0
    warmup: int = 2


QUICK = Effort(sample_seconds=0.002, rounds=(5, 10), seconds=0.2, warmup=1)


class Sample(NamedTuple):
    """Seconds per call on device and host; waits: the call synchronizes."""

    device: float
    host: float
    waits: bool


@dataclass(frozen=True)
class Timing:
    seconds: float
    low: float
    high: float
    samples: tuple[Sample, ...]

    @property
    def device(self) -> float:
        return statistics.median(each.device for each in self.samples)

    @property
    def host(self) -> float:
        return statistics.median(each.host for each in self.samples)


class Ratio(NamedTuple):
    """Median of the rounds' ratios with its confidence interval."""

    ratio: float
    low: float
    high: float


def time_interleaved(
    contenders: Mapping[str, Call],
    effort: Effort,
    device: str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[dict[str, Timing], dict[str, str]]:
    errors: dict[str, str] = {}
    calls: dict[str, int] = {}
    for name, run in contenders.items():
        try:
            calls[name] = _calls(run, effort, device, clock)
        except Exception as error:
            errors[name] = format_error(error)
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    start = clock()
    least, most = effort.rounds
    for number in range(most):
        if number >= least and clock() - start >= effort.seconds:
            break
        for name in list(calls):
            try:
                samples[name].append(_sample(contenders[name], calls[name], device, clock))
            except Exception as error:
                errors[name] = format_error(error)
                del calls[name]
    return {name: timing(samples[name]) for name in calls}, errors


def timing(samples: Sequence[Sample]) -> Timing:
    ordered = sorted(max(each.device, each.host) for each in samples)
    return Timing(statistics.median(ordered), quantile(ordered, 0.1), quantile(ordered, 0.9), tuple(samples))


def ratio(of: Timing, over: Timing) -> Ratio:
    pairs = sorted(max(a[:2]) / max(b[:2]) for a, b in zip(of.samples, over.samples, strict=True))
    skip = _outside(len(pairs))
    return Ratio(statistics.median(pairs), pairs[skip], pairs[-1 - skip])


def format_error(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:400].rstrip(": ")


def _calls(run: Call, effort: Effort, device: str, clock: Callable[[], float]) -> int:
    for _ in range(effort.warmup):
        run()
    most = _MAX_CALLS if device == "cpu" else _MAX_QUEUED_CALLS
    calls = 1
    while True:
        seconds = max(_sample(run, calls, device, clock)[:2]) * calls
        if seconds >= effort.sample_seconds or calls >= most:
            return calls
        # Slightly more than needed, bounded for readings too short to trust.
        wanted = calls * 1.2 * effort.sample_seconds / max(seconds, 1e-9)
        calls = min(most, max(calls + 1, min(math.ceil(wanted), calls * 100)))


def _sample(run: Call, calls: int, device: str, clock: Callable[[], float]) -> Sample:
    if device != "cpu":
        return _device_sample(getattr(torch, device), run, calls)
    # Without garbage collection, as in timeit.
    seconds = timeit.Timer(run, timer=clock).timeit(calls) / calls
    return Sample(seconds, seconds, False)


def _device_sample(module: Any, run: Call, calls: int) -> Sample:
    """Queue calls after a spinning kernel (CUDA), so that they run without gaps.

    A call that synchronizes (`.item()`) ends the spin early; its device time then includes the host's.
    """
    sample = _queued(module, run, calls, _SPIN_CYCLES * (1 + calls))
    if sample.waits:  # or the host is slower than the spin
        sample = _queued(module, run, calls, _SPIN_CYCLES + int(_CYCLES_PER_SECOND * sample.host * calls))
    return sample


def _queued(module: Any, run: Call, calls: int, cycles: int) -> Sample:
    start, end, spun = (module.Event(enable_timing=True) for _ in range(3))
    spin = getattr(module, "_sleep", None)
    module.synchronize()
    if spin is not None:
        spin(cycles)
    spun.record()
    start.record()
    seconds = timeit.Timer(run).timeit(calls) / calls
    waits = spin is not None and bool(spun.query())
    end.record()
    module.synchronize()
    return Sample(start.elapsed_time(end) / 1e3 / calls, seconds, waits)


def _outside(count: int) -> int:
    """Sorted values outside the median's confidence interval per side (sign test).

    Below six values the interval is the whole range.
    """
    skip, missed = 0, 1 / 2**count  # probability that the median lies beyond the outermost value
    while True:
        missed += math.comb(count, skip + 1) / 2**count
        if missed > (1 - CONFIDENCE) / 2:
            return skip
        skip += 1
