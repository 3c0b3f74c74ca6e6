"""How what a search has found is put in words and in JSON; the standard library alone."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mindspeed_lite.bench.wording import size
from mindspeed_lite.planner import step_time
from mindspeed_lite.planner.published import PublishedDevice
from mindspeed_lite.planner.search import FoundLayout, Result, Search
from mindspeed_lite.planner.why import Answer

from . import terminal


def found(search: Search, result: Result, seconds: float, width: int, color: bool) -> list[str]:
    """The best as a table, and the flags of each to paste."""
    lines = terminal.wrap(_about(search, result, seconds), width)
    if not result.best:
        lines.append("")
        lines += terminal.wrap(
            f"nothing fits: the least that weights, gradients, optimizer states and the reserve take is "
            f"{size(result.least_bytes)}, and there are {size(search.budget)}: add devices or memory",
            width,
        )
        return lines
    lines += ["", *_table(search, result.best, width, color), ""]
    lines += [terminal.paint("flags to paste, in place of the command's own", "bold", color), ""]
    for number, each in enumerate(result.best, 1):
        lines.append(f"{number:2}  {shlex.join(flags(search, each))}")
    return lines


def flags(search: Search, each: FoundLayout) -> list[str]:
    return each.candidate.flags(search.base(each.candidate.tp))


def answer(search: Search, result: Result, asked: Answer, width: int, color: bool) -> list[str]:
    """Why what was asked about is not the best."""
    lines = [terminal.paint(f"why not {asked.asked}", "bold", color), ""]
    here = asked.result
    if not here.considered:
        return [*lines, *terminal.wrap("no layout of these devices is like that: the sizes do not divide them", width)]
    if not here.best:
        if here.too_large:
            text = f"{here.too_large} of {here.considered} layouts like that are too large"
            if asked.smallest is not None:
                each = asked.smallest
                text += (
                    f"; {each.candidate.name} takes {size(each.bytes)} on stage {each.stage}, "
                    f"{size(each.bytes - search.budget)} more than there are"
                )
        else:
            reason, count = here.impossible.most_common(1)[0]
            text = f"none of {here.considered} layouts like that runs; of {count} the reason is {reason}"
        return [*lines, *terminal.wrap(text, width)]
    one, best = here.best[0], result.best[0]
    if one.seconds <= best.seconds:
        return [*lines, *terminal.wrap(f"it is the best: {one.candidate.name}", width)]
    text = f"the fastest like that, {one.candidate.name}, takes {one.seconds / best.seconds:.2f} times as long"
    lines += [*terminal.wrap(text, width), ""]
    rows = []
    names = {**one.step.parts, **best.step.parts}
    for name in sorted(names, key=lambda each: best.step.parts.get(each, 0) - one.step.parts.get(each, 0)):
        mine, its = one.step.parts.get(name, 0.0), best.step.parts.get(name, 0.0)
        rows.append((name, _seconds(mine), _seconds(its), f"{'+' if mine >= its else '-'}{_seconds(abs(mine - its))}"))
    headers = ("spent on", "this", "best", "difference")
    return lines + (terminal.table(headers, rows, width, color, (0,) * 4) or [])


def report(search: Search, result: Result, asked: Answer | None) -> dict[str, Any]:
    """Everything, for a file."""
    return {
        "device": search.pricer.device.name,
        "devices": search.world_size,
        "budget_bytes": search.budget,
        "considered": result.considered,
        "impossible": dict(result.impossible),
        "too_large": result.too_large,
        "simulated": result.simulated,
        "pruned": result.pruned,
        "best": [_record(search, each) for each in result.best],
        "front": [_record(search, each) for each in result.front],
        "why": None
        if asked is None
        else {"asked": asked.asked, "best": [_record(search, each) for each in asked.result.best]},
    }


def _record(search: Search, each: FoundLayout) -> dict[str, Any]:
    return {
        "name": each.candidate.name,
        "candidate": asdict(each.candidate),
        "seconds": each.seconds,
        "parts": dict(each.step.parts),
        "bytes": each.bytes,
        "stage": each.stage,
        "tokens_per_second": step_time.throughput(each.training, each.seconds),
        "flags": flags(search, each),
    }


def _about(search: Search, result: Result, seconds: float) -> str:
    device = search.pricer.device
    source = "published figures" if isinstance(device, PublishedDevice) else "what was measured"
    return (
        f"{result.considered} layouts on {search.world_size} devices ({device.name}, by {source}) in {seconds:.1f} s: "
        f"{sum(result.impossible.values())} do not run, {result.too_large} are too large, {result.simulated} were "
        f"simulated, and {result.pruned} cannot be faster than these."
    )


def _table(search: Search, best: Sequence[FoundLayout], width: int, color: bool) -> list[str]:
    rows = []
    for number, each in enumerate(best, 1):
        tokens = step_time.throughput(each.training, each.seconds) / search.world_size
        rows.append(
            (str(number), each.candidate.name, _seconds(each.seconds), f"{tokens:.4g}", size(each.bytes), _bounds(each))
        )
    headers = ("", "layout", "step", "tokens/s each", "memory", "what its time goes to")
    minimum = (0, 18, 0, 0, 0, 24)
    return (
        terminal.table(headers, rows, width, color, minimum)
        or terminal.table(headers, rows, 1000, color, minimum)
        or []
    )


def _bounds(each: FoundLayout) -> str:
    shares = [(name, value / each.seconds) for name, value in step_time.by_category(each.step.parts)]
    return ", ".join(f"{name} {share:.0%}" for name, share in shares[:4] if share >= 0.02)


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
