"""Searches for the fastest layouts of the training in COMMAND that fit into memory: tensor, pipeline, virtual, context,
expert and data parallelism, micro-batch, recomputation and where optimizer states are. Global batch, model and features
stay. With --this, COMMAND's own layout alone: its time, the memory of each stage, and what each feature would give or
take. Time and memory are predicted; nothing is run.

examples:
  mindspeed-lite plan --devices 8x8 --device h100 -- pretrain_gpt.py --num-layers 32 ...
  mindspeed-lite plan --devices 64 --device ascend-910b --why "TP8 PP8" -- pretrain_gpt.py ...
  mindspeed-lite plan --this --device h100 -- torchrun --nproc-per-node 8 pretrain_gpt.py ...
  mindspeed-lite plan --devices 2 --memory 8GB --device here -- torchrun pretrain_gpt.py ...

exit code: 0; 1 where no layout fits; 2 for bad input; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from mindspeed_lite import planner
from mindspeed_lite.bench.wording import size
from mindspeed_lite.planner import arguments, candidates, choose_device, devices, links, step_time, why
from mindspeed_lite.planner.published import PublishedDevice
from mindspeed_lite.planner.search import FoundLayout, Result, Search
from mindspeed_lite.planner.step_time import Pricer

from . import terminal, training_command
from .calibrate import default_file
from .terminal import CommandError, Parser, bounded, option, output_file, say, table, write_json, writing


def add_options(parser: Parser) -> None:
    option(parser, "--devices N", "how many devices there are, or nodes x devices such as 8x8 (default: as torchrun's "
           "options in COMMAND)", _devices)  # fmt: skip
    option(parser, "--memory SIZE", "memory of each, as 80GB or 80GiB (default: the device's)",
           training_command.memory_size)  # fmt: skip
    option(parser, "--device NAME", f"what they are: {', '.join(devices.FIGURES)}, a .json file of your own, or "
           "what was calibrated here", default="here")  # fmt: skip
    option(parser, "--calibration FILE", "what `mindspeed-lite calibrate` wrote, for --device here")
    option(parser, "--links FILE", "what `mindspeed-lite links --json` wrote: measured links in place of the device's")
    option(parser, "--reserve SIZE", "memory for what is not predicted: workspaces, fragments (default: a tenth)",
           training_command.memory_size)  # fmt: skip
    option(parser, "--this", "predict COMMAND's own layout, and search for no other")
    option(parser, "--expert-imbalance FACTOR", "tokens of the rank whose experts get most, over an even share",
           bounded(float, 1), step_time.IMBALANCE)  # fmt: skip
    option(parser, "--count N", "how many to show", bounded(int, 1), 10)
    option(parser, "--why LAYOUT", "why a layout such as 'PP8' or 'TP4 PP2' is not better")
    option(parser, "--plot FILE", "draw time and memory of those that nothing beats in both", output_file)
    training_command.add_command(parser)


def _devices(text: str) -> tuple[int, int]:
    """Number of devices, in total and per node; 0 per node if not given."""
    found = re.fullmatch(r"(?:([1-9]\d{0,5})x)?([1-9]\d{0,6})", text)
    if not found:
        raise argparse.ArgumentTypeError(
            f"takes a number such as 64, or nodes x devices such as 8x8, not {text[:40]!r}"
        )
    node = int(found[2])
    return (int(found[1]) * node, node) if found[1] else (node, 0)


def main(options: argparse.Namespace) -> int:
    if options.plot and not Path(options.plot).suffix:
        raise CommandError(f"--plot {options.plot}: its ending says what kind of picture it is: give one such as .png")
    for name in ("why", "plot") if options.this else ():
        if getattr(options, name):
            raise CommandError(f"--{name} is about the search, which --this leaves out: drop one of them")
    if options.why:
        why.question(options.why)
    number, node = options.devices or (training_command.world_size(options.command, "--devices"), 0)
    file = Path(options.calibration) if options.calibration else default_file()
    measured = links.read(options.links, number) if options.links else None
    cores = len(os.sched_getaffinity(0))
    pricer, kind = choose_device.pricer_of(options.device, file, min(number, cores), node, measured)
    memory = options.memory if options.memory is not None else pricer.device.memory
    if not memory:
        raise CommandError(f"--memory: give the memory of each device, which --device {options.device} does not say")
    reserve = memory / 10 if options.reserve is None else options.reserve
    if reserve >= memory:
        raise CommandError(f"--reserve {size(reserve)}: it is a part of --memory {size(memory)}, and less than that")
    words = training_command.translated(options.command)
    options.command = training_command.with_auto(words, number, kind, options.vocabulary)
    search = _search(options, number, kind, memory, pricer, reserve)
    with terminal.progress("tracing Megatron's layers"):
        own, problem = _own(options, number, kind, search)
        changes = [*planner.changes(own.training)] if options.this and own else []
    report: dict[str, Any] = {"device": pricer.device.name, "devices": number, "budget_bytes": memory}
    if options.this:
        if own is None:
            raise CommandError(problem)
        _show_own(search, own, changes)
        _show_untimed(options.command)
        features = {"features": [asdict(each) for each in changes]}
        write_json(options.json, report | _this(own, search) | features)
        return 0
    began = time.perf_counter()
    with terminal.progress("reading the command") as show:
        result = search.run(options.count, progress=show)
        if not result.best:
            result = search.run(options.count, lambda candidate: True, progress=show)
        seconds = time.perf_counter() - began
        answer = why.ask(search, options.why) if options.why else None
    if not result.considered:
        raise CommandError(
            f"no layout of {number} devices divides --global-batch-size, heads, layers and sequence of the "
            "command: change --devices or --global-batch-size"
        )
    if sum(result.impossible.values()) == result.considered:
        reason, count = result.impossible.most_common(1)[0]
        try:
            search.training(next(iter(search.space())))
        except planner.ArgumentError as error:
            reason = str(error) if str(error).startswith(reason) else reason
        raise CommandError(f"none of {result.considered} layouts runs; of {count} the reason is: {reason}")
    _show(search, result, seconds, own, problem)
    if answer is not None:
        _show_why(search, result.best, answer)
    _show_untimed(options.command)
    counts = ("considered", "impossible", "too_large", "unneeded", "simulated", "pruned")
    report |= {
        **{name: getattr(result, name) for name in counts},
        "this": None if own is None else _this(own, search),
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


def _search(
    options: argparse.Namespace, number: int, kind: str, memory: float, pricer: Pricer, reserve: float
) -> Search:
    words = candidates.without_chosen(options.command)

    def base(tp: int) -> planner.TrainingConfig:
        training = arguments.describe(
            [*words, "--tensor-model-parallel-size", str(tp), "--micro-batch-size", "1"],
            number, kind, options.vocabulary,
        )  # fmt: skip
        if not training.global_batch_size:
            raise planner.ArgumentError("--global-batch-size is not in the command: layouts are compared at one size")
        return training.replace(expert_load=options.expert_imbalance)

    return Search(base, number, memory, pricer, reserve)


def _own(options: argparse.Namespace, number: int, kind: str, search: Search) -> tuple[FoundLayout | None, str]:
    """COMMAND's own layout, or why it is not predicted."""
    if not options.this and not any(word.startswith("--micro-batch-size") for word in options.command):
        return None, ""
    try:
        training = arguments.read(options.command, number, kind, options.vocabulary)
        return search.found(training.replace(expert_load=options.expert_imbalance)), ""
    except planner.ArgumentError as error:
        return None, str(error)


def _show_own(search: Search, own: FoundLayout, changes: Sequence[planner.Change]) -> None:
    rest = search.budget - own.bytes
    say(
        f"{own.candidate.name} on {search.world_size} devices ({search.pricer.device.name}): a step takes "
        f"{_seconds(own.seconds)}, {_tokens_per_second(own) / search.world_size:.4g} tokens/s each; the fullest rank, "
        f"of stage {own.stage}, takes {size(own.bytes)} of {size(search.budget)} with {size(search.reserve)} in "
        f"reserve: {'it fits' if rest >= 0 else f'{size(-rest)} too much'}\n"
    )
    rows = [
        (name, _seconds(value), f"{value / own.seconds:.0%}") for name, value in step_time.by_category(own.step.parts)
    ]
    table(("time goes to", "", ""), rows)
    _show_stages(planner.ranks(own.training))
    _show_changes(changes)


def _show_stages(ranks: Sequence[planner.Rank]) -> None:
    rows = []
    for _, group in groupby(ranks, key=lambda each: (each.layers, each.states, each.lines)):
        first, *_, last = [*group] * 2
        spans = [f"{low}-{high}" if low < high else str(low)
                 for low, high in ((first.ranks[0], last.ranks[1]), (first.stage, last.stage))]  # fmt: skip
        sizes = {name: size(value) for name, value in first.categories.items()}
        if first.states.host:
            sizes["optimizer"] += f" + {size(first.states.host)} on the host"
        rows.append((*spans, str(first.layers), *sizes.values(), str(first.kept), size(first.total)))
    headers = ("ranks", "stage", "layers", *ranks[0].categories, "kept", "total")
    table(headers, rows, "memory without the reserve; kept: micro-batches of activations")


def _show_changes(changes: Sequence[planner.Change]) -> None:
    rows = []
    for each in changes:
        total = each.having - each.without
        # Another rank may become the fullest, with small differences elsewhere.
        changed = {name: change for name, change in each.difference.items() if abs(change) > abs(total) / 100}
        parts = [f"{name} {_signed(change)}" if len(changed) > 1 else name for name, change in changed.items()]
        if not total:
            stage, change = max(enumerate(each.stages), key=lambda pair: abs(pair[1]))
            parts = [f"{_signed(change)} on stage {stage}"]
        state = "on" if each.is_on else "off"
        rows.append((each.flag, state, size(each.without), size(each.having), _signed(total), ", ".join(parts)))
    title = "what a feature does to the rank that takes most: the same command without it and with it"
    table(("feature", "now", "without", "with", "change", "in"), rows, title)


def _signed(change: int) -> str:
    return f"{'+' if change > 0 else '-' if change else ''}{size(abs(change))}"


def _show(search: Search, result: Result, seconds: float, own: FoundLayout | None, problem: str) -> None:
    device = search.pricer.device
    source = "published figures" if isinstance(device, PublishedDevice) else "what was measured"
    say(
        f"{result.considered} layouts on {search.world_size} devices ({device.name}, by {source}) in {seconds:.1f} s: "
        f"{sum(result.impossible.values())} do not run, {result.too_large} are too large, {result.unneeded} save "
        f"memory that fits without, {result.simulated} were simulated, and {result.pruned} cannot be faster than "
        "these.\n"
    )
    if not result.best:
        say(
            f"nothing fits: the least that weights, gradients, optimizer states and the reserve take is "
            f"{size(result.least_bytes)}, and there are {size(search.budget)}: add devices or memory"
        )
        return
    rows = [_row("own" if own.bytes <= search.budget else "too large", own, search)] if own else []
    rows += [_row(str(number), each, search) for number, each in enumerate(result.best, 1)]
    table(("", "layout", "step", "tokens/s each", "memory", "what its time goes to"), rows)
    if problem:
        say(f"\nThe command's own layout is not predicted: {problem}")
    say("\nflags to paste, in place of the command's own\n", "bold")
    for number, each in enumerate(result.best, 1):
        say(f"{number}  {each.candidate.name}")
        terminal.show_command(_flags(search, each))


def _row(name: str, each: FoundLayout, search: Search) -> tuple[str, ...]:
    shares = [(part, value / each.seconds) for part, value in step_time.by_category(each.step.parts)]
    spent = ", ".join(f"{part} {share:.0%}" for part, share in shares[:4] if share >= 0.02)
    tokens = f"{_tokens_per_second(each) / search.world_size:.4g}"
    return name, each.candidate.name, _seconds(each.seconds), tokens, size(each.bytes), spent


def _show_untimed(words: Sequence[str]) -> None:
    for flag, reason in arguments.untimed(words):
        say(f"\n{flag} is not in the predicted time: {reason}")
    training_command.show_untraced()


def _show_why(search: Search, best: Sequence[FoundLayout], answer: why.Answer) -> None:
    found, least = answer.result, answer.smallest
    say(f"\nwhy not {answer.asked}\n", "bold")
    if not found.considered:
        say(answer.excluded)
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
        one = found.best[0]
        hint = ", with unequal stages, which are searched where none are equal" * (one.seconds < best[0].seconds)
        say(f"it is the fastest: {one.candidate.name}, {_seconds(one.seconds)}{hint}")
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


def _this(own: FoundLayout, search: Search) -> dict[str, Any]:
    ranks = planner.ranks(own.training)
    return {
        "name": own.candidate.name,
        "step_s": own.seconds,
        "memory_bytes": own.bytes - int(search.reserve),
        "reserve_bytes": search.reserve,
        "fits": own.bytes <= search.budget,
        "stage": own.stage,
        "parts": dict(own.step.parts),
        "memory_parts": ranks[own.stage].categories,
        "stages": [asdict(each) for each in ranks],
        "tokens_per_second": _tokens_per_second(own),
    }


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
