"""A/B test of a feature by training steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from mindspeed_lite.tuning.chunk_autotuner import median_time_ratio

# Uncounted: allocations and first library calls.
WARMUP_STEPS = 4
PAIRS = 8
# Less is noise.
MIN_SPEEDUP = 0.005


class StepABTest:
    """Alternates a feature off and on per step, then keeps the faster.

    Args:
        clock: seconds, after all issued work is done.
    """

    def __init__(self, clock: Callable[[], float], say: Callable[[str], None]) -> None:
        self._clock = clock
        self._say = say
        self._began: float | None = None
        self._seconds: list[float] = []
        self.decided = False
        self.on = False

    def begin_step(self) -> None:
        if self.decided:
            return
        now = self._clock()
        if self._began is not None:
            self._seconds.append(now - self._began)
        self._began = now
        steps = len(self._seconds)
        if steps == WARMUP_STEPS + 2 * PAIRS:
            self._decide()
        else:
            self.on = steps % 2 == 1

    def _decide(self) -> None:
        counted = self._seconds[WARMUP_STEPS:]
        off, on = counted[::2], counted[1::2]
        wins = sum(mine < without for mine, without in zip(on, off, strict=True))
        self.on = median_time_ratio(on, off) < 1 - MIN_SPEEDUP
        self.decided = True
        times = f"{1e3 * statistics.median(off):.1f} ms a step without, {1e3 * statistics.median(on):.1f} ms with"
        verdict = "stays on" if self.on else "is off from now on, because it is not clearly faster"
        self._say(f"{verdict} ({times}; faster in {wins} of {PAIRS} pairs of steps)")
