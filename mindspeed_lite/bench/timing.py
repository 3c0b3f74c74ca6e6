"""Times contenders side by side: A B C, A B C, ..., so that what disturbs the machine disturbs all of them.

A sample is a loop of calls long enough to be measured, with the device idle before and after it. A contender's time
is the median of its samples. Two contenders are compared by the ratios of their samples of the same round: what
slows a whole round down cancels out there, as it does not between two medians.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mindspeed_lite.bench.statistics import quantile

CONFIDENCE = 0.95

_MAX_CALLS = 100_000


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    sample_seconds: the least a sample lasts. rounds: at least and at most so many; between them, until `seconds`
    have passed. warmup: calls of each contender before anything counts.
    """

    sample_seconds: float = 0.01
    rounds: tuple[int, int] = (7, 40)
    seconds: float = 2.0
    warmup: int = 2


QUICK = Effort(sample_seconds=0.002, rounds=(5, 10), seconds=0.2, warmup=1)


@dataclass(frozen=True)
class Timing:
    """Seconds per call: median, 10 % and 90 % quantile, and every sample by round."""

    seconds: float
    low: float
    high: float
    samples: tuple[float, ...]


@dataclass(frozen=True)
class Ratio:
    """The median of the rounds' ratios with its confidence interval."""

    ratio: float
    low: float
    high: float


def race(
    contenders: Mapping[str, Callable[[], object]],
    effort: Effort,
    synchronize: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[dict[str, Timing], dict[str, str]]:
    """The timing of each contender, and for those that raised while running what they said.

    A contender that fails drops out; the others go on.
    """
    errors: dict[str, str] = {}
    calls: dict[str, int] = {}
    for name, run in contenders.items():
        try:
            calls[name] = _calls(run, effort, synchronize, clock)
        except Exception as error:  # whatever a library raises is the reader's to know
            errors[name] = said(error)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    start = clock()
    least, most = effort.rounds
    for number in range(most):
        if number >= least and clock() - start >= effort.seconds:
            break
        for name in list(calls):
            try:
                samples[name].append(_sample(contenders[name], calls[name], synchronize, clock) / calls[name])
            except Exception as error:
                errors[name] = said(error)
                del calls[name]
    return {name: timing(samples[name]) for name in calls}, errors


def timing(samples: Sequence[float]) -> Timing:
    """The summary of samples in the order of their rounds."""
    ordered = sorted(samples)
    return Timing(statistics.median(ordered), quantile(ordered, 0.1), quantile(ordered, 0.9), tuple(samples))


def ratio(of: Timing, over: Timing) -> Ratio:
    """How many times as long `of` takes as `over`, from pairs of the same round."""
    pairs = sorted(a / b for a, b in zip(of.samples, over.samples, strict=True))
    skip = _outside(len(pairs))
    return Ratio(statistics.median(pairs), pairs[skip], pairs[-1 - skip])


def said(error: BaseException) -> str:
    """An exception as one short line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:400].rstrip(": ")


@contextmanager
def no_collection() -> Iterator[None]:
    """Within the block Python does not collect garbage of its own accord."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _calls(
    run: Callable[[], object], effort: Effort, synchronize: Callable[[], None], clock: Callable[[], float]
) -> int:
    """Warm up, and say how many calls make a sample."""
    for _ in range(effort.warmup):
        run()
    calls = 1
    while True:
        seconds = _sample(run, calls, synchronize, clock)
        if seconds >= effort.sample_seconds or calls >= _MAX_CALLS:
            return calls
        # A little more than needed, but no leap from a reading too short to trust.
        wanted = calls * 1.2 * effort.sample_seconds / max(seconds, 1e-9)
        calls = min(_MAX_CALLS, max(calls + 1, min(math.ceil(wanted), calls * 100)))


def _sample(
    run: Callable[[], object], calls: int, synchronize: Callable[[], None], clock: Callable[[], float]
) -> float:
    """Seconds of so many calls, from an idle device to an idle device."""
    with no_collection():
        synchronize()
        start = clock()
        for _ in range(calls):
            run()
        synchronize()
        return clock() - start


def _outside(count: int) -> int:
    """How many sorted values stand outside the median's confidence interval on either side.

    By the sign test: no assumption about the distribution. Under six values no interval is sure enough, and the
    whole range is all there is.
    """
    skip, missed = 0, 1 / 2**count  # the chance that the true median lies beyond the outermost value
    while True:
        missed += math.comb(count, skip + 1) / 2**count
        if missed > (1 - CONFIDENCE) / 2:
            return skip
        skip += 1
