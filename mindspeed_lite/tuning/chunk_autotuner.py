"""Chooses by trial the chunk count that best overlaps a layer's pass with communication.

All ranks time the passes together, once per shape, and take the slowest rank's best count.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mindspeed_lite.platform.timer import seconds_of

CANDIDATES = (1, 2, 4, 8)
ROUNDS = 7
# Required gain, in all rounds but MAX_LOST_ROUNDS; less is noise.
MIN_SPEEDUP = 0.03
MAX_LOST_ROUNDS = 1
# Fewer rows are not worth a message.
MIN_ROWS_PER_CHUNK = 8


def median_time_ratio(times: Sequence[float], of: Sequence[float]) -> float:
    """Median ratio to the same round; 1 unless below 1 in all rounds but `MAX_LOST_ROUNDS`."""
    ratios = [mine / whole for mine, whole in zip(times, of, strict=True)]
    return statistics.median(ratios) if sum(ratio < 1 for ratio in ratios) >= len(ratios) - MAX_LOST_ROUNDS else 1.0


@dataclass(frozen=True)
class Trial:
    """Seconds of the slowest rank by chunk count and round."""

    rounds: dict[int, list[float]]

    @functools.cached_property
    def best(self) -> int:
        share = {number: median_time_ratio(times, self.rounds[1]) for number, times in self.rounds.items()}
        fastest = min(share, key=lambda each: share[each])
        return fastest if share[fastest] < 1 - MIN_SPEEDUP else 1

    def __str__(self) -> str:
        times = ", ".join(f"{number}: {1e3 * statistics.median(each):.2f} ms" for number, each in self.rounds.items())
        chosen = f"{self.best} chunks" if self.best > 1 else "1 chunk, because more are not clearly faster"
        return f"{chosen} ({times})"


class ChunkAutotuner:
    """`ChunkPolicy` that times each pass at the first call per shape.

    Args:
        say: receives each result, on the group's first rank.
    """

    def __init__(self, group: dist.ProcessGroup, say: Callable[[str], None]) -> None:
        self._group = group
        self._say = say if group.rank() == 0 else lambda text: None
        self._best: dict[tuple[object, ...], int] = {}

    def __call__(self, phase: str, x: torch.Tensor, w: torch.Tensor, run: Callable[[int], object]) -> int:
        """Best count; a collective at the first call of a shape."""
        key = _key(phase, x, w)
        if key not in self._best:
            counts = [each for each in CANDIDATES if each == 1 or each * MIN_ROWS_PER_CHUNK <= x.shape[0]]
            self._best[key] = 1
            if len(counts) > 1:
                trial = Trial(self._measured(counts, x, run))
                self._say(f"{phase} of {x.shape[0]} rows, {x.shape[1]} x {w.shape[1]}: {trial}")
                self._best[key] = trial.best
        return self._best[key]

    def known(self, phase: str, x: torch.Tensor, w: torch.Tensor, run: Callable[[int], object]) -> int:
        """1 for a new shape, e.g. in evaluation, without a trial."""
        return self._best.get(_key(phase, x, w), 1)

    def _measured(self, counts: list[int], x: torch.Tensor, run: Callable[[int], object]) -> dict[int, list[float]]:
        seconds: dict[int, list[float]] = {number: [] for number in counts}
        with torch.no_grad():
            for number in counts:
                run(number)
            for _ in range(ROUNDS):
                for number in counts:
                    # Ranks begin together; some backends bind a barrier to a device that they choose.
                    dist.all_reduce(torch.zeros(1, device=x.device), group=self._group)
                    seconds[number].append(seconds_of(functools.partial(run, number), x.device))
        slowest = torch.tensor([*seconds.values()], device=x.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._group)
        return dict(zip(counts, slowest.tolist(), strict=True))


def _key(phase: str, x: torch.Tensor, w: torch.Tensor) -> tuple[object, ...]:
    return (phase, *x.shape, w.shape[1], x.dtype)
