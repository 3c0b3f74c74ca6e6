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

from mindspeed_lite.bench.statistics import spread

_MAX_CALLS = 100_000
_MAX_QUEUED_CALLS = 16  # launch queues are finite
_SPIN_CYCLES = 2_000_000
_CYCLES_PER_SECOND = 3e9  # half again as many as a GPU has

Call = Callable[[], object]
_clock = time.perf_counter


@dataclass(frozen=True)
class Effort:
    """Amount of measurement.

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
    waits: bool = False

    @property
    def seconds(self) -> float:
        return max(self.device, self.host)


@dataclass(frozen=True)
class Timing:
    """Median seconds of a call; low, high: 10 % and 90 % quantile."""

    samples: Sequence[Sample]
    seconds: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Timing:
        seconds = [each.seconds for each in samples]
        return cls(samples, statistics.median(seconds), *spread(seconds))

    @property
    def device(self) -> float:
        return statistics.median(each.device for each in self.samples)

    @property
    def host(self) -> float:
        return statistics.median(each.host for each in self.samples)

    def over(self, other: Timing) -> tuple[float, float, float]:
        """Median, 10 % and 90 % quantile of the rounds' ratios."""
        ratios = [a.seconds / b.seconds for a, b in zip(self.samples, other.samples, strict=True)]
        return (statistics.median(ratios), *spread(ratios))


def time_interleaved(
    contenders: Mapping[str, Call], effort: Effort, device: str = "cpu"
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Timings by name, and errors of those that failed."""
    errors: dict[str, str] = {}
    calls: dict[str, int] = {}
    for name, run in contenders.items():
        try:
            calls[name] = _calls(run, effort, device)
        except Exception as error:
            errors[name] = format_error(error)
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    start = _clock()
    for number in range(effort.rounds[1]):
        if number >= effort.rounds[0] and _clock() - start >= effort.seconds:
            break
        for name in list(calls):
            try:
                samples[name].append(_sample(contenders[name], calls[name], device))
            except Exception as error:
                errors[name] = format_error(error)
                del calls[name]
    return {name: Timing.of(samples[name]) for name in calls}, errors


def time_one(run: Call, effort: Effort, device: str = "cpu") -> Timing:
    """Timing of one function; raises RuntimeError if it fails."""
    timed, errors = time_interleaved({"": run}, effort, device)
    if errors:
        raise RuntimeError(errors[""])
    return timed[""]


def format_error(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:400].rstrip(": ")


def _calls(run: Call, effort: Effort, device: str) -> int:
    """Number of calls that take `sample_seconds`."""
    for _ in range(effort.warmup):
        run()
    calls, most = 1, _MAX_CALLS if device == "cpu" else _MAX_QUEUED_CALLS
    while True:
        seconds = _sample(run, calls, device).seconds * calls
        if seconds >= effort.sample_seconds or calls >= most:
            return calls
        # Slightly more than needed, bounded for readings too short to trust.
        wanted = calls * 1.2 * effort.sample_seconds / max(seconds, 1e-9)
        calls = min(most, max(calls + 1, min(math.ceil(wanted), calls * 100)))


def _sample(run: Call, calls: int, device: str) -> Sample:
    if device != "cpu":
        return _device_sample(getattr(torch, device), run, calls)
    # Without garbage collection, as in timeit.
    seconds = timeit.Timer(run, timer=_clock).timeit(calls) / calls
    return Sample(seconds, seconds)


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
