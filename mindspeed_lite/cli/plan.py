"""Searches for the fastest layouts of the training in COMMAND that fit into memory: tensor, pipeline, virtual, context,
expert and data parallelism, micro-batch, recomputation and where optimizer states are. Time and memory are predicted;
nothing is run. What COMMAND itself says of these is not looked at. Global batch, model and features stay.

examples:
  mindspeed-lite plan --devices 64 --memory 80 --device h100 -- pretrain_gpt.py --num-layers 32 ...
  mindspeed-lite plan --devices 64 --memory 64 --device ascend-910b --why "TP8 PP8" -- pretrain_gpt.py ...
  mindspeed-lite plan --devices 2 --memory 8 --device here -- torchrun pretrain_gpt.py ...

exit code: 0; 1 where nothing fits; 2 for bad input; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mindspeed_lite import planner
from mindspeed_lite.bench.wording import significant, size
from mindspeed_lite.planner import arguments, candidates, choose_device, devices, step_time, why
from mindspeed_lite.planner.published import PublishedDevice
from mindspeed_lite.planner.search import FoundLayout, Result, Search

from . import terminal, training_command
from .calibrate import default_file
from .terminal import CommandError, Parser, bounded, option, output_file, say, table, write_json, writing


def add_options(parser: Parser) -> None:
    option(parser, "--devices N", "how many devices there are", bounded(int, 1, 10_000_000), required=True)
    option(parser, "--memory GB", "memory of each", bounded(float, 0, 1_000_000, above=True), required=True)
    option(parser, "--device NAME", f"what they are: {', '.join(devices.FIGURES)}, or what was calibrated here",
           default="here")  # fmt: skip
    option(parser, "--calibration FILE", "what `mindspeed-lite calibrate` wrote, for --device here")
    option(parser, "--reserve GB", "memory for what is not predicted: workspaces, fragments (default: a tenth)",
           bounded(float, 0))  # fmt: skip
    option(parser, "--expert-imbalance FACTOR", "tokens of the rank whose experts get most, over an even share",
           bounded(float, 1), 1.0)  # fmt: skip
    option(parser, "--count N", "how many to show", bounded(int, 1), 10)
    option(parser, "--why LAYOUT", "why a layout such as 'PP8' or 'TP4 PP2' is not better")
    option(parser, "--plot FILE", "draw time and memory of those that nothing beats in both", output_file)
    training_command.add_command(parser, "--devices N --memory GB ")


def main(options: argparse.Namespace) -> int:
    if options.plot and not Path(options.plot).suffix:
        raise CommandError(f"--plot {options.plot}: its ending says what kind of picture it is: give one such as .png")
    if options.reserve is not None and options.reserve >= options.memory:
        text = f"--reserve {options.reserve:g}: it is a part of --memory {options.memory:g}, and less than that"
        raise CommandError(text)
    with terminal.progress("reading the command") as tell:
        search = _search(options, tell)
        began = time.perf_counter()
        result = search.run(options.count)
        seconds = time.perf_counter() - began
        answer = why.ask(search, options.why) if options.why else None
    if not result.considered:
        raise CommandError(
            f"no layout of {options.devices} devices divides --global-batch-size, heads, layers and sequence of the "
            "command: change --devices or --global-batch-size"
        )
    if sum(result.impossible.values()) == result.considered:
        reason, count = result.impossible.most_common(1)[0]
        try:
            search.training(next(iter(search.space())))
        except planner.ArgumentError as error:
            reason = str(error) if str(error).startswith(reason) else reason
        raise CommandError(f"none of {result.considered} layouts runs; of {count} the reason is: {reason}")
    _show(search, result, seconds)
    if answer is not None:
        _show_why(search, result.best, answer)
    for flag, reason in arguments.untimed(options.command):
        say(f"\n{flag} is not in the predicted time: {reason}")
    report = {
        "device": search.pricer.device.name,
        "devices": search.world_size,
        "budget_bytes": search.budget,
        **{name: getattr(result, name) for name in ("considered", "impossible", "too_large", "simulated", "pruned")},
        "best": [_as_json(search, each) for each in result.best],
        "front": [_as_json(search, each) for each in result.front],
        "why": answer and {"asked": answer.asked, "best": [_as_json(search, each) for each in answer.result.best]},
    }
    write_json(options.json, report)
    if options.plot:
        with writing("--plot", options.plot):
            from mindspeed_lite.bench import plot_plan

            plot_plan.front(search, result, Path(options.plot))
    return 0 if result.best else 1


def _search(options: argparse.Namespace, tell: terminal.Progress) -> Search:
    file = Path(options.calibration) if options.calibration else default_file()
    pricer, kind = choose_device.pricer_of(options.device, file, min(options.devices, len(os.sched_getaffinity(0))))
    words = candidates.without_chosen(options.command)

    def base(tp: int) -> planner.TrainingConfig:
        training = arguments.describe(
            [*words, "--tensor-model-parallel-size", str(tp), "--micro-batch-size", "1"],
            options.devices, kind, options.vocabulary,
        )  # fmt: skip
        if not training.global_batch_size:
            raise planner.ArgumentError("--global-batch-size is not in the command: layouts are compared at one size")
        return training.replace(expert_load=options.expert_imbalance)

    reserve = options.memory / 10 if options.reserve is None else options.reserve
    return Search(base, options.devices, options.memory * 1e9, pricer, reserve * 1e9, tell)


def _show(search: Search, result: Result, seconds: float) -> None:
    device = search.pricer.device
    source = "published figures" if isinstance(device, PublishedDevice) else "what was measured"
    say(
        f"{result.considered} layouts on {search.world_size} devices ({device.name}, by {source}) in {seconds:.1f} s: "
        f"{sum(result.impossible.values())} do not run, {result.too_large} are too large, {result.simulated} were "
        f"simulated, and {result.pruned} cannot be faster than these.\n"
    )
    if not result.best:
        say(
            f"nothing fits: the least that weights, gradients, optimizer states and the reserve take is "
            f"{size(result.least_bytes)}, and there are {size(search.budget)}: add devices or memory"
        )
        return
    rows = []
    for number, each in enumerate(result.best, 1):
        shares = [(name, value / each.seconds) for name, value in step_time.by_category(each.step.parts)]
        spent = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares[:4] if share >= 0.02)
        tokens = significant(_tokens_per_second(each) / search.world_size, 4)
        rows.append((str(number), each.candidate.name, _seconds(each.seconds), tokens, size(each.bytes), spent))
    table(("", "layout", "step", "tokens/s each", "memory", "what its time goes to"), rows)
    say("\nflags to paste, in place of the command's own\n", "bold")
    for number, each in enumerate(result.best, 1):
        say(f"{number}  {each.candidate.name}")
        terminal.show_command(_flags(search, each))


def _show_why(search: Search, best: Sequence[FoundLayout], answer: why.Answer) -> None:
    found, least = answer.result, answer.smallest
    say(f"\nwhy not {answer.asked}\n", "bold")
    if not found.considered:
        say("no layout of these devices is like that: the sizes do not divide them")
    elif not found.best and found.too_large:
        excess = "" if least is None else (
            f"; {least.candidate.name} takes {size(least.bytes)} on stage {least.stage}, "
            f"{size(least.bytes - search.budget)} more than there are"
        )  # fmt: skip
        say(f"{found.too_large} of {found.considered} layouts like that are too large{excess}")
    elif not found.best:
        reason, count = found.impossible.most_common(1)[0]
        say(f"none of {found.considered} layouts like that runs; of {count} the reason is {reason}")
    elif found.best[0].seconds <= best[0].seconds:
        say(f"it is the best: {found.best[0].candidate.name}")
    else:
        one = found.best[0]
        say(f"the fastest like that, {one.candidate.name}, takes {one.seconds / best[0].seconds:.2f} times as long\n")
        mine, its = one.step.parts, best[0].step.parts
        pairs = {name: (mine.get(name, 0.0), its.get(name, 0.0)) for name in {**mine, **its}}
        table(
            ("spent on", "this", "best", "difference"),
            [
                (name, _seconds(a), _seconds(b), f"{'+' if a >= b else '-'}{_seconds(abs(a - b))}")
                for name, (a, b) in sorted(pairs.items(), key=lambda pair: pair[1][0] - pair[1][1], reverse=True)
            ],
        )


def _as_json(search: Search, each: FoundLayout) -> dict[str, Any]:
    return {
        "name": each.candidate.name,
        "candidate": asdict(each.candidate),
        "seconds": each.seconds,
        "parts": dict(each.step.parts),
        "bytes": each.bytes,
        "stage": each.stage,
        "tokens_per_second": _tokens_per_second(each),
        "flags": _flags(search, each),
    }


def _tokens_per_second(each: FoundLayout) -> float:
    return step_time.throughput(each.training, each.seconds)


def _flags(search: Search, each: FoundLayout) -> list[str]:
    return each.candidate.flags(search.base(each.candidate.tp))


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
