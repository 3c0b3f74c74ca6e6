"""What two training logs say side by side: losses, step times, and whether they tell the same story."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

WARM_UP = 5  # steps whose times are left out: compilation, first touch of memory
LAST = 10  # steps whose mean loss counts as where training ended
FALL = 0.7  # the part of the first loss below which it must end
# The largest difference of the loss between off and on that is agreement: rounding is in another order,
# and training amplifies it step by step.
TOLERANCE = {"fp32": 0.002, "bf16": 0.05}

_STEP = re.compile(r"iteration\s+(\d+)/\s*\d+ \|.*?elapsed time per iteration \(ms\): ([\d.]+)(.*)")
_LOSS = re.compile(r"lm loss: (\S+)")
_MEMORY = re.compile(r"max allocated: ([\d.]+)")


@dataclass(frozen=True)
class Run:
    """One training run: a loss and a time in milliseconds for each step, and its peak memory in MB."""

    losses: tuple[float, ...]
    times: tuple[float, ...]
    memory: float

    @property
    def steady(self) -> tuple[float, ...]:
        """Step times after the warm-up."""
        return self.times[WARM_UP:]

    @property
    def step_time(self) -> float:
        return statistics.median(self.steady)

    def decile(self, number: int) -> float:
        """The step time that so many tenths of the steps stay below."""
        return statistics.quantiles(self.steady, n=10, method="inclusive")[number - 1]


@dataclass(frozen=True)
class Verdict:
    """How far the losses of off and on are apart at most, where, and everything that is wrong."""

    difference: float
    step: int
    tolerance: float
    problems: tuple[str, ...]


def parse_log(log: str, steps: int, memory: float | None = None) -> Run:
    """Read Megatron's log, printed at every step; `memory` overrides what the log says of it.

    Raises:
        ValueError: the log does not have every step from 1 to `steps`.
    """
    found: dict[int, tuple[float, float]] = {}
    for step, time, rest in _STEP.findall(log):
        loss = _LOSS.search(rest)
        # A step whose loss is not a number is logged without one.
        found[int(step)] = (float(loss[1]) if loss else math.nan, float(time))
    missing = sorted(set(range(1, steps + 1)) - set(found))
    if missing:
        raise ValueError(f"the log has {len(found)} of {steps} steps, and step {missing[0]} is missing")
    if memory is None:
        memory = max(map(float, _MEMORY.findall(log)), default=math.nan)
    losses, times = zip(*(found[step] for step in range(1, steps + 1)), strict=True)
    return Run(losses, times, memory)


def largest_difference(first: Sequence[float], second: Sequence[float]) -> tuple[float, int]:
    """The largest difference of two series and the first step (from 1) where it is; NaN is infinite."""
    differences = [abs(a - b) for a, b in zip(first, second, strict=True)]
    largest, step = max((math.inf if math.isnan(d) else d, -step) for step, d in enumerate(differences, 1))
    return largest, -step


def why_not_falling(losses: Sequence[float]) -> str | None:
    """The reason why these losses do not fall as training should make them, or None."""
    if not all(map(math.isfinite, losses)):
        return f"the loss of step {[math.isfinite(loss) for loss in losses].index(False) + 1} is not a number"
    first, last = losses[0], statistics.fmean(losses[-LAST:])
    if last > FALL * first:
        return f"the loss went from {first:.3f} to {last:.3f}, not below {FALL:.0%} of where it began"
    return None


def judge(off: Sequence[Run], on: Sequence[Run], tolerance: float) -> Verdict:
    """Compare every run with features off to the one with features on beside it."""
    difference, step = max(largest_difference(a.losses, b.losses) for a, b in zip(off, on, strict=True))
    problems = []
    for label, runs in (("off", off), ("on", on)):
        for number, run in enumerate(runs, 1):
            reason = why_not_falling(run.losses)
            if reason:
                problems.append(f"features {label}, round {number}: {reason}")
    if difference > tolerance:
        problems.append(f"off and on disagree by {difference:.3g} in the loss at step {step}; {tolerance:g} is allowed")
    return Verdict(difference, step, tolerance, tuple(problems))


def ratios(off: Sequence[Run], on: Sequence[Run]) -> list[float]:
    """How many times as fast a step is with features on, for each round."""
    return [a.step_time / b.step_time for a, b in zip(off, on, strict=True)]


def unsteady(runs: Sequence[Run]) -> bool:
    """Whether step times within some run differ by more than half: then something else ran beside it."""
    return any(run.decile(9) > 1.5 * run.decile(1) for run in runs)


def loss_table(off: Run, on: Run, rows: int = 6) -> list[str]:
    """The losses side by side: the first step, then means over parts of the training, as steps are noisy."""
    count = len(off.losses)
    edges = [round(count * row / rows) for row in range(rows + 1)]
    parts = [(0, 1), (1, edges[1]), *pairwise(edges[1:])]
    lines = [f"{'step':>8}{'loss off':>12}{'loss on':>12}{'difference':>14}"]
    for begin, end in parts:
        steps = f"{begin + 1}-{end}" if end > begin + 1 else f"{end}"
        a, b = (statistics.fmean(run.losses[begin:end]) for run in (off, on))
        largest, _ = largest_difference(off.losses[begin:end], on.losses[begin:end])
        lines.append(f"{steps:>8}{a:>12.4f}{b:>12.4f}{largest:>14.1e}")
    return lines


def speed_table(off: Sequence[Run], on: Sequence[Run]) -> list[str]:
    """Step times of each round, what a step takes when undisturbed, and peak memory; off, on and their ratios."""
    each = ratios(off, on)
    lines = [f"{'step time':22}{'off':>12}{'on':>12}"]
    for number, (a, b, ratio) in enumerate(zip(off, on, each, strict=True), 1):
        lines.append(
            f"{f'  round {number}, median':22}{a.step_time:>9.0f} ms{b.step_time:>9.0f} ms{ratio:>8.2f}x as fast"
        )
    quick = tuple(min(run.decile(1) for run in runs) for runs in (off, on))
    lines.append(f"{'  the fastest tenth':22}{quick[0]:>9.0f} ms{quick[1]:>9.0f} ms{quick[0] / quick[1]:>8.2f}x")
    memory = max(run.memory for run in off), max(run.memory for run in on)
    lines.append(f"{'peak memory':22}{memory[0]:>9.0f} MB{memory[1]:>9.0f} MB{memory[1] / memory[0]:>8.2f} of it")
    rounds = f"{min(each):.2f} to {max(each):.2f} over {len(each)} rounds" if len(each) > 1 else "one round"
    if unsteady([*off, *on]):
        lines += [
            "",
            "Step times differ by more than half within a run: this machine was busy with something else.",
            f"The medians ({rounds}) say little.",
            f"Undisturbed, a step with features on is {quick[0] / quick[1]:.2f}x as fast.",
        ]
    else:
        lines += ["", f"A step with features on is {statistics.median(each):.2f}x as fast ({rounds})."]
    return lines
