"""`mindspeed-lite schedule`: the pipeline schedule that a training command runs, drawn, and beside other orders."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mindspeed_lite import planner
from mindspeed_lite.json_file import JsonFileError
from mindspeed_lite.pipeline import check, costs, draw, orders, trace
from mindspeed_lite.pipeline.steps import Schedule
from mindspeed_lite.planner.arguments import misspelt
from mindspeed_lite.planner.pipeline_costs import StepSeconds

from . import schedule_candidates as candidates
from . import schedule_text, terminal, training_command
from .terminal import fail

PROGRAM = "mindspeed-lite schedule"

DESCRIPTION = """\
Prints and draws the pipeline schedule that COMMAND runs, without running it, with the predicted share of idle time,
the peak memory of each rank and the communication that is waited for. --order compares it with other orders and names
the fastest that fits into --memory."""

EPILOG = f"""\
orders: {", ".join((*orders.TRAINING_ORDERS, *candidates.DERIVED))}, and one of your own as
FILE.py:FUNCTION or MODULE:FUNCTION. Several are divided by commas; `all` stands for every published one.

examples:
  mindspeed-lite schedule -- torchrun --nproc-per-node 8 pretrain_gpt.py --pipeline-model-parallel-size 4 ...
  mindspeed-lite schedule --order all --times 12,11,9 --memory 60 --png orders.png -- torchrun ... pretrain_gpt.py ...
  mindspeed-lite schedule --trace steps.jsonl -- torchrun ... pretrain_gpt.py ...

exit code: 0; 1 where nothing fits into --memory; 2 for bad input."""


def main(arguments: Sequence[str]) -> int:
    """Print the schedules, and write what is asked for; returns the exit code."""
    given = list(arguments)
    place = given.index("--") if "--" in given else len(given)
    options, command = _parser().parse_args(given[:place]), given[place + 1 :]
    if not command:
        return fail(PROGRAM, f"no command to read; write it after `--`: {PROGRAM} -- torchrun ... pretrain_gpt.py ...")
    for flag, name in (("--json", options.json), ("--png", options.png)):
        if name and (problem := terminal.why_not_writable(name)):
            return fail(PROGRAM, f"{flag} {name}: {problem}")
    try:
        words = candidates.Command.read(command)
        ranks = training_command.world_size(options.world_size, command)
        training = planner.read(words.rest, ranks, options.device or training_command.device(), options.vocabulary or 0)
        for word, meant in misspelt(words.rest):
            print(f"{PROGRAM}: {word} is not known here; if {meant} is meant, it is not counted", file=sys.stderr)
        known = _given(options)
        found, refused = candidates.evaluate(words, training, options.order, known)
        executed = _executed(options.trace, found[0].simulation.schedule) if options.trace else []
        if executed and known.seconds is None:
            known = replace(known, seconds=_recorded_seconds(executed, found[0].simulation.schedule))
            found, refused = candidates.evaluate(words, training, options.order, known)
    except (planner.ArgumentError, check.ScheduleError, orders.OrderError, trace.TraceError, JsonFileError) as error:
        return fail(PROGRAM, error)
    has_seconds = known.seconds is not None
    lines = schedule_text.report(training, found, refused, options.memory, has_seconds)
    if executed:
        lines += ["", *schedule_text.compared_with_trace(found[0], executed)]
    print("\n".join(lines))
    try:
        if options.json:
            report = schedule_text.as_json(training, found, refused, options.memory, has_seconds, options.steps)
            Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
        if options.png:
            titles = {schedule_text.title(each, has_seconds): each.simulation for each in found}
            draw.png(titles, options.png, "s" if has_seconds else "forward passes", executed)
    except ImportError as error:
        return fail(PROGRAM, f"--png: {error}; `mindspeed-lite doctor` says what is missing")
    except OSError as error:  # the disk has become full
        return fail(PROGRAM, f"cannot be written: {error.strerror or error}")
    return 1 if options.memory is not None and not any(each.fits for each in found) else 0


def _executed(name: str, schedule: Schedule) -> list[trace.ExecutedStep]:
    """The records of the last whole training step."""
    try:
        return trace.training_steps(trace.read(name), schedule)[-1]
    except trace.TraceError as error:
        raise trace.TraceError(f"{name}: {error}") from None


def _recorded_seconds(executed: Sequence[trace.ExecutedStep], schedule: Schedule) -> StepSeconds:
    """What a micro-batch took on an average rank."""
    found = costs.from_measured(trace.median_seconds(executed, schedule), schedule.num_stages)
    ahead, back, weights = (
        sum(each) / schedule.num_ranks for each in (found.forward, found.input_grad, found.weight_grad)
    )
    message = trace.overheads([executed], trace.as_executed(schedule, executed)).message
    return StepSeconds(ahead, back, weights, message)


def _given(options: argparse.Namespace) -> candidates.Given:
    if options.memory is not None and not options.memory > 0:
        raise planner.ArgumentError(f"--memory is a number of GiB above 0, not {options.memory:g}")
    if not (math.isfinite(options.overlap) and options.overlap > 0):
        raise planner.ArgumentError(f"--overlap is a share above 0, not {options.overlap:g}")
    if options.times is None:
        return candidates.Given(overlap=options.overlap, limit=options.memory)
    try:
        values = [float(part) / 1000 for part in options.times.split(",")]
    except ValueError:
        values = []
    if len(values) not in (3, 4) or not all(math.isfinite(value) and value >= 0 for value in values) or not values[0]:
        raise planner.ArgumentError(
            "--times takes milliseconds F,B,W or F,B,W,M: forward, input gradient and weight gradients of a "
            f"micro-batch on a rank, and a message between ranks, not {options.times!r}"
        )
    return candidates.Given(StepSeconds(*values), options.overlap, options.memory)


def _parser() -> argparse.ArgumentParser:
    parser = terminal.Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [options] -- COMMAND ...",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument("--order", default="", metavar="NAMES", help="orders to compare the command's own with")
    parser.add_argument(
        "--times", metavar="F,B,W[,M]",
        help="measured milliseconds of a micro-batch on a rank: forward, input gradient, weight gradients; and of a "
        "message",
    )  # fmt: skip
    parser.add_argument(
        "--overlap", type=float, default=1.0, metavar="X",
        help="time of an overlapped forward and backward as a share of the two (default %(default)g: no gain)",
    )  # fmt: skip
    parser.add_argument("--memory", type=float, metavar="GIB", help="device memory of a rank")
    parser.add_argument(
        "--trace", metavar="PATH", help="what a run recorded (a file, or --pipeline-schedule-trace's folder)"
    )
    parser.add_argument("--png", metavar="FILE", help="write a picture of the orders")
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON")
    parser.add_argument("--steps", action="store_true", help="with --json: every step and its time as well")
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="ranks of the training (default: as torchrun is told)"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda", "npu"), help="for which device (default: the one here, else cuda)"
    )
    parser.add_argument("--vocabulary", type=int, metavar="N", help="words before padding, where a tokenizer decides")
    return parser
