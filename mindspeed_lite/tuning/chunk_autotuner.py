"""Chooses by trial the chunk count that best overlaps a layer's pass with communication.

All ranks time the passes together, once per shape, and take the slowest rank's best count. Results are cached.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from .cache import TuningCache

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

    phase: str
    shape: tuple[int, int, int]
    rounds: dict[int, list[float]]

    @functools.cached_property
    def best(self) -> int:
        share = {number: median_time_ratio(times, self.rounds[1]) for number, times in self.rounds.items()}
        fastest = min(share, key=lambda each: share[each])
        return fastest if share[fastest] < 1 - MIN_SPEEDUP else 1

    @classmethod
    def of(cls, phase: str, shape: tuple[int, int, int], kept: Mapping[str, list[float]]) -> Trial | None:
        """None if a trial would now measure others."""
        rounds = {int(number): times for number, times in kept.items()}
        sound = 1 in rounds and set(rounds) <= set(CANDIDATES)
        return cls(phase, shape, rounds) if sound and all(len(each) == ROUNDS for each in rounds.values()) else None

    def to_text(self) -> str:
        times = ", ".join(f"{number}: {1e3 * statistics.median(each):.2f} ms" for number, each in self.rounds.items())
        rows, inner, outer = self.shape
        chosen = f"{self.best} chunks" if self.best > 1 else "1 chunk, because more are not clearly faster"
        return f"{self.phase} of {rows} rows, {inner} x {outer}: {chosen} ({times})"


class ChunkAutotuner:
    """`ChunkPolicy` that times each pass at the first call per shape.

    Args:
        say: receives each result, on the group's first rank.
        folder: folder of cached trials, or raises `NoCache`; called on the first rank. None on all ranks: no cache.
    """

    def __init__(
        self, group: dist.ProcessGroup, say: Callable[[str], None], folder: Callable[[], Path] | None = None
    ) -> None:
        self._group = group
        self._say = say if group.rank() == 0 else lambda text: None
        self._folder = folder
        self._kept: TuningCache | None = None
        self._found: dict[tuple[object, ...], Trial] = {}

    def __call__(self, phase: str, x: torch.Tensor, w: torch.Tensor, run: Callable[[int], object]) -> int:
        """Best count; a collective at the first call of a shape."""
        key = _key(phase, x, w)
        trial = self._found.get(key)
        if trial is None:
            numbers = [each for each in CANDIDATES if each == 1 or each * MIN_ROWS_PER_CHUNK <= x.shape[0]]
            shape = (x.shape[0], x.shape[1], w.shape[1])
            trial = self._tried(phase, shape, numbers, x, run) if len(numbers) > 1 else Trial(phase, shape, {1: [1.0]})
            self._found[key] = trial
        return trial.best

    def known(self, phase: str, x: torch.Tensor, w: torch.Tensor, run: Callable[[int], object]) -> int:
        """1 for a new shape, e.g. in evaluation, without a trial."""
        trial = self._found.get(_key(phase, x, w))
        return 1 if trial is None else trial.best

    def _tried(
        self, phase: str, shape: tuple[int, int, int], numbers: list[int], x: torch.Tensor, run: Callable[[int], object]
    ) -> Trial:
        if self._kept is None and self._folder is not None:
            self._kept = TuningCache(self._folder, self._group, x.device)
        kept = self._kept
        name = f"{phase} {' '.join(map(str, shape))} {x.dtype}"
        trial = None if kept is None else Trial.of(phase, shape, kept.found.get(name, {}))
        if kept is not None and trial is not None and [*trial.rounds] == numbers:
            self._say(f"{trial.to_text()}, as kept in {kept.path} by an earlier run")
            return trial
        trial = Trial(phase, shape, self._measured(numbers, x, run))
        self._say(trial.to_text())
        if kept is not None and (problem := kept.add(name, trial.rounds)) is not None:
            self._say(f"trials cannot be kept for later runs: {problem}")
        return trial

    def _measured(self, numbers: list[int], x: torch.Tensor, run: Callable[[int], object]) -> dict[int, list[float]]:
        seconds: dict[int, list[float]] = {number: [] for number in numbers}
        with torch.no_grad():
            for number in numbers:
                run(number)
            for _ in range(ROUNDS):
                for number in numbers:
                    self._together(x)
                    start = time.perf_counter()
                    run(number)
                    _synchronize(x)
                    seconds[number].append(time.perf_counter() - start)
        slowest = torch.tensor([*seconds.values()], device=x.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._group)
        return dict(zip(numbers, slowest.tolist(), strict=True))

    def _together(self, x: torch.Tensor) -> None:
        """Synchronizes ranks; some backends bind a barrier to a device of their own choice."""
        dist.all_reduce(torch.zeros(1, device=x.device), group=self._group)
        _synchronize(x)


def _key(phase: str, x: torch.Tensor, w: torch.Tensor) -> tuple[object, ...]:
    return (phase, *x.shape, w.shape[1], x.dtype)


def _synchronize(x: torch.Tensor) -> None:
    if x.device.type != "cpu":
        getattr(torch, x.device.type).synchronize(x.device)
