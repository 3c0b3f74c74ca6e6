"""`mindspeed-lite plan`: the fastest ways to lay a training out over devices, found by prediction."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mindspeed_lite import planner
from mindspeed_lite.planner import arguments, candidates, choose_device, devices, flags, why
from mindspeed_lite.planner.search import Search

from . import plan_text, terminal
from .calibrate import default_file
from .terminal import fail

PROGRAM = "mindspeed-lite plan"
MOST_DEVICES, MOST_GIB = 10_000_000, 1_000_000

DESCRIPTION = """\
Searches for the fastest layouts of the training in COMMAND that fit into memory: tensor, pipeline, virtual, context,
expert and data parallelism, micro-batch, recomputation and where optimizer states are. Time and memory are predicted;
nothing is run. What COMMAND itself says of these is not looked at. Global batch, model and features stay."""

EPILOG = """\
examples:
  mindspeed-lite plan --devices 64 --memory 80 --device h100 -- pretrain_gpt.py --num-layers 32 ...
  mindspeed-lite plan --devices 64 --memory 64 --device ascend-910b --why "TP8 PP8" -- pretrain_gpt.py ...
  mindspeed-lite plan --devices 2 --memory 8 --device here -- torchrun pretrain_gpt.py ...

exit code: 0; 1 where nothing fits; 2 for bad input; 130 after Ctrl-C."""


def main(arguments_: Sequence[str]) -> int:
    """Search and show; returns the exit code."""
    given = list(arguments_)
    place = given.index("--") if "--" in given else len(given)
    options, command = _parser().parse_args(given[:place]), given[place + 1 :]
    if not command:
        return fail(PROGRAM, f"no command to plan; write it after `--`: {PROGRAM} [options] -- pretrain_gpt.py ...")
    if wrong := _problem(options):
        return fail(PROGRAM, wrong)
    for flag, name in (("--json", options.json), ("--plot", options.plot)):
        if name and (problem := terminal.why_not_writable(name)):
            return fail(PROGRAM, f"{flag} {name}: {problem}")
    try:
        search = search_of(options, command)
        began = time.perf_counter()
        result = search.run(options.count)
        seconds = time.perf_counter() - began
        answer = why.ask(search, options.why) if options.why else None
    except planner.ArgumentError as error:
        return fail(PROGRAM, error)
    if not result.considered:
        return fail(
            PROGRAM,
            f"no layout of {options.devices} devices divides --global-batch-size, heads, layers and sequence of the "
            "command: change --devices or --global-batch-size",
        )
    if sum(result.impossible.values()) == result.considered:
        reason, count = result.impossible.most_common(1)[0]
        return fail(
            PROGRAM,
            f"none of {result.considered} layouts runs; of {count} the reason is: {_full_reason(search, reason)}",
        )
    lines = plan_text.found(search, result, seconds, terminal.width(), terminal.has_color())
    if answer is not None:
        lines += ["", *plan_text.answer(search, result, answer, terminal.width(), terminal.has_color())]
    for flag, reason in arguments.untimed(command):
        lines += ["", *terminal.wrap(f"{flag} is not in the predicted time: {reason}", terminal.width())]
    print("\n".join(lines))
    try:
        if options.json:
            Path(options.json).write_text(json.dumps(plan_text.report(search, result, answer), indent=1) + "\n")
        if options.plot:
            from mindspeed_lite.bench import plot_plan

            plot_plan.front(search, result, Path(options.plot))
    except ImportError as error:
        return fail(PROGRAM, f"--plot needs matplotlib: {error}")
    except (OSError, ValueError) as error:
        return fail(PROGRAM, f"a file cannot be written: {error}")
    return 0 if result.best else 1


def _full_reason(search: Search, begin: str) -> str:
    """What the first layout is refused for, if its reason begins like that."""
    try:
        search.training(next(iter(search.space())))
    except planner.ArgumentError as error:
        return str(error) if str(error).startswith(begin) else begin
    return begin


def _problem(options: argparse.Namespace) -> str:
    """What is wrong with the numbers among the options; empty if nothing is."""
    if not 1 <= options.devices <= MOST_DEVICES or not 0 < options.memory <= MOST_GIB:
        return f"--devices and --memory are above 0, at most {MOST_DEVICES:,} devices and {MOST_GIB:,} GiB"
    if options.plot and not Path(options.plot).suffix:
        return f"--plot {options.plot}: its ending says what kind of picture it is: give one such as .png"
    if options.count < 1:
        return f"--count {options.count}: want how many layouts to show, at least 1"
    if options.reserve is not None and not 0 <= options.reserve < options.memory:
        return (
            f"--reserve {options.reserve:g}: it is a part of --memory {options.memory:g}: 0 or more, and less than that"
        )
    if not 1 <= options.expert_imbalance < float("inf"):
        return (
            f"--expert-imbalance {options.expert_imbalance:g}: the fullest rank has at least an even share: 1 or more"
        )
    if options.vocabulary is not None and not 1 <= options.vocabulary <= flags.LARGEST:
        return f"--vocabulary {options.vocabulary}: want how many words there are, at least 1"
    return ""


def search_of(options: argparse.Namespace, command: Sequence[str]) -> Search:
    """The search that options and command ask for; ArgumentError if they contradict each other."""
    file = Path(options.calibration) if options.calibration else default_file()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pricer, kind = choose_device.pricer_of(options.device, file, min(options.devices, cores))
    words = candidates.without_chosen(command)

    def base(tp: int) -> planner.TrainingConfig:
        training = arguments.describe(
            [*words, "--tensor-model-parallel-size", str(tp), "--micro-batch-size", "1"],
            options.devices, kind, options.vocabulary or 0,
        )  # fmt: skip
        if not training.global_batch_size:
            raise planner.ArgumentError("--global-batch-size is not in the command: layouts are compared at one size")
        return training.replace(expert_load=options.expert_imbalance)

    reserve = options.memory / 10 if options.reserve is None else options.reserve
    return Search(base, options.devices, options.memory * (1 << 30), pricer, reserve * (1 << 30))


def _parser() -> argparse.ArgumentParser:
    parser = terminal.Parser(
        prog=PROGRAM, usage=f"{PROGRAM} --devices N --memory GIB [options] -- COMMAND ...", description=DESCRIPTION,
        epilog=EPILOG,
    )  # fmt: skip
    parser.add_argument("--devices", type=int, required=True, metavar="N", help="how many devices there are")
    parser.add_argument("--memory", type=float, required=True, metavar="GIB", help="memory of each, GiB")
    parser.add_argument(
        "--device", default="here", metavar="NAME",
        help=f"what they are: {', '.join(devices.FIGURES)}, or what was calibrated here (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--calibration", metavar="FILE", help="what `mindspeed-lite calibrate` wrote, for --device here"
    )
    parser.add_argument(
        "--reserve", type=float, metavar="GIB",
        help="of the memory, for what is not predicted: workspaces, buffers, fragments (default: a tenth)",
    )  # fmt: skip
    parser.add_argument(
        "--expert-imbalance", type=float, default=1.0, metavar="FACTOR",
        help="tokens of the rank whose experts get most, over an even share (default %(default)g)",
    )  # fmt: skip
    parser.add_argument("--count", type=int, default=10, metavar="N", help="how many to show (default %(default)s)")
    parser.add_argument("--why", metavar="LAYOUT", help="why a layout such as 'PP8' or 'TP4 PP2' is not better")
    parser.add_argument("--vocabulary", type=int, metavar="N", help="words before padding, where a tokenizer decides")
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON")
    parser.add_argument("--plot", metavar="FILE", help="draw time and memory of those that nothing beats in both")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
