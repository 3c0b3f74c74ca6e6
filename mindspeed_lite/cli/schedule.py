"""Prints and draws the pipeline schedule that COMMAND runs, without running it, with the predicted share of idle time,
the peak memory of each rank and the communication that is waited for. --order compares it with other orders and names
the fastest that fits into --memory.

examples:
  mindspeed-lite schedule -- torchrun --nproc-per-node 8 pretrain_gpt.py --pipeline-model-parallel-size 4 ...
  mindspeed-lite schedule --order all --times 12,11,9 --memory 60 --png orders.png -- torchrun ... pretrain_gpt.py ...
  mindspeed-lite schedule --trace steps.jsonl -- torchrun ... pretrain_gpt.py ...

exit code: 0; 1 where nothing fits into --memory; 2 for bad input.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mindspeed_lite.bench.wording import percent, significant, size
from mindspeed_lite.bench.wording import seconds as in_seconds
from mindspeed_lite.pipeline import costs, draw, orders, trace
from mindspeed_lite.pipeline.simulate import Simulation, simulate
from mindspeed_lite.pipeline.steps import steps_of
from mindspeed_lite.planner import order_candidates
from mindspeed_lite.planner.order_candidates import OrderBuilder, OrderCandidate, OrderFlags
from mindspeed_lite.planner.pipeline_costs import StepSeconds

from . import terminal, training_command
from .terminal import CommandError, Parser, bounded, option, say, table


def add_options(parser: Parser) -> None:
    names = ", ".join((*orders.TRAINING_ORDERS, *order_candidates.DERIVED))
    option(parser, "--order NAMES", f"orders to compare the command's own with, divided by commas: {names}; one of "
           "your own as FILE.py:FUNCTION or MODULE:FUNCTION; `all` for every published one", default="")  # fmt: skip
    option(parser, "--times F,B,W[,M]", "measured milliseconds of a micro-batch on a rank: forward, input gradient, "
           "weight gradients; and of a message", _times)  # fmt: skip
    option(parser, "--overlap X", "time of an overlapped forward and backward as a share of the two; 1: no gain",
           bounded(float, 0, above=True), 1.0)  # fmt: skip
    option(parser, "--memory SIZE", "device memory of a rank, as 80GB or 80GiB", training_command.memory_size)
    option(parser, "--trace PATH", "what a run recorded (a file, or --pipeline-schedule-trace's folder)")
    option(parser, "--png FILE", "write a picture of the orders", terminal.output_file)
    option(parser, "--steps", "with --json: every step and its time as well")
    parser.add_argument("--device", choices=("cpu", "cuda", "npu"),
        help="for which device (default: MINDSPEED_LITE_DEVICE, an NPU that is here, else cuda)")  # fmt: skip
    option(parser, "--world-size N", "ranks of the training (default: torchrun's in COMMAND, else WORLD_SIZE, "
           "else 1)", bounded(int, 1))  # fmt: skip
    training_command.add_command(parser)


def _times(text: str) -> StepSeconds:
    try:
        values = [float(part) / 1000 for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) not in (3, 4) or not all(math.isfinite(value) and value >= 0 for value in values) or not values[0]:
        raise argparse.ArgumentTypeError(
            "takes milliseconds F,B,W or F,B,W,M: forward, input gradient and weight gradients of a micro-batch on a "
            f"rank, and a message between ranks, not {text!r}"
        )
    return StepSeconds(*values)


def main(options: argparse.Namespace) -> int:
    flags = OrderFlags.read(options.command)
    training = training_command.read(options, flags.rest)
    limit = options.memory
    builder = OrderBuilder(training, flags, options.times, options.overlap, limit)
    with terminal.progress("simulating the orders"):
        found, refused = builder.compare(options.order)
    executed: Simulation | None = None
    if options.trace:
        try:
            executed = trace.training_steps(trace.read(options.trace), found[0].simulation.schedule)[-1]
        except trace.TraceError as error:
            raise CommandError(f"{options.trace}: {error}") from error
        if builder.seconds is None:
            builder = replace(builder, seconds=_recorded_seconds(executed))
            found, refused = builder.compare(options.order)
    has_seconds = builder.seconds is not None
    _show_own(found[0], has_seconds)
    _show_orders(found, refused, limit, has_seconds)
    if executed is not None:
        _show_executed(executed)
    if options.json:
        fastest = order_candidates.fastest(found)
        report = {
            "pipeline_ranks": training.pp,
            "microbatches": training.microbatches,
            "unit": "s" if has_seconds else "forward passes of a micro-batch on an average rank",
            "memory_limit_bytes": limit,
            "fastest": fastest.name if fastest else None,
            "orders": [_as_json(each, options.steps) for each in found],
            "not_applicable": refused,
        }
        terminal.write_json(options.json, report)
    if options.png:
        titles = {
            f"{each.name}: step {_time(each.simulation.makespan, has_seconds)}, idle {percent(each.simulation.bubble)},"
            f" at most {each.peak_live} chunk activations, {size(each.peak_bytes)}": each.simulation
            for each in found
        } | ({} if executed is None else {"executed": executed})
        with terminal.writing("--png", options.png):
            draw.png(titles, options.png, "s" if has_seconds else "forward passes")
    return 1 if options.memory is not None and not any(each.fits for each in found) else 0


def _recorded_seconds(executed: Simulation) -> StepSeconds:
    found, ranks = trace.median_costs([executed]), executed.schedule.num_ranks
    forward, input_grad, weight_grad = (
        sum(each) / ranks for each in (found.forward, found.input_grad, found.weight_grad)
    )
    return StepSeconds(forward, input_grad, weight_grad, found.message)


def _show_own(own: OrderCandidate, has_seconds: bool) -> None:
    schedule, time = own.simulation.schedule, own.simulation.makespan
    ranks, chunks, batches = schedule.num_ranks, schedule.num_chunks, schedule.microbatches
    say(
        f"{own.name}: {ranks} pipeline rank{'s' * (ranks != 1)}, {chunks} model chunk{'s' * (chunks != 1)} each, "
        f"{batches} micro-batch{'es' * (batches != 1)}\n",
        "bold",
    )
    print("\n".join(draw.text(own.simulation, terminal.width(), terminal.has_color())), end="\n\n")
    rows = []
    for rank, (states, kept) in enumerate(zip(own.constant_bytes, own.activation_bytes, strict=True)):
        shares = (own.simulation.idle(rank) / time, own.simulation.exposed(rank) / time)
        live = str(costs.peak_live(schedule, rank))
        stages = " ".join(map(str, schedule.placement[rank]))
        rows.append((str(rank), stages, *map(percent, shares), live, *map(size, (states, kept, states + kept))))
    table(("rank", "stages", "idle", "of it messages", "chunks live", "states", "activations", "total"), rows)
    if not has_seconds:
        say(
            "\nTimes are relative: 1 is the forward pass of a micro-batch on an average rank, from counted operations "
            "without any communication. --times F,B,W takes measured milliseconds."
        )


def _show_orders(
    found: Sequence[OrderCandidate], refused: dict[str, str], limit: float | None, has_seconds: bool
) -> None:
    if len(found) > 1:
        say()
        headers = ["order", "chunks", "step", "idle", "of it messages", "chunks live", "peak memory", "fits"]
        rows = [
            (
                each.name, str(each.simulation.schedule.num_chunks), _time(each.simulation.makespan, has_seconds),
                percent(each.simulation.bubble), percent(each.simulation.exposed_share), str(each.peak_live),
                size(each.peak_bytes), "yes" if each.fits else "no",
            )
            for each in found
        ]  # fmt: skip
        columns = slice(None if limit is not None else -1)
        table(headers[columns], [row[columns] for row in rows])
    for name, reason in refused.items():
        say(f"{name} does not apply: {reason}")
    training_command.show_untraced()
    if any(each.name == "zb-auto" for each in found[1:]):
        say("Pass what `chunks live` says of zb-auto with --pipeline-schedule-max-live to run it within that.")
    fastest, under = (
        order_candidates.fastest(found),
        f" within {size(limit)}" if limit is not None else "",
    )
    if fastest is None:
        say(f"\nno order fits{under}: the least is {size(min(each.peak_bytes for each in found))}")
    elif len(found) > 1:
        is_own = fastest is found[0]
        say(f"\nfastest{under}: {fastest.name}{', the order of the command' if is_own else ''}", "green")
        flags = order_candidates.flags(fastest)
        if flags is None:
            say(f"{fastest.name} is only simulated; leave it out of --order for the flags of the next")
        elif not is_own:
            say("flags to paste, in place of the command's own for its order:")
            terminal.show_command(flags)


def _show_executed(executed: Simulation) -> None:
    simulated = simulate(executed.schedule, trace.median_costs([executed]))
    say(
        f"\nexecuted in this order, last training step: {in_seconds(executed.makespan)}, idle "
        f"{percent(executed.bubble)}; simulated with the median times of its steps and the mean time of its messages: "
        f"{in_seconds(simulated.makespan)}, idle {percent(simulated.bubble)}"
    )


def _as_json(candidate: OrderCandidate, has_steps: bool) -> dict[str, Any]:
    simulation = candidate.simulation
    schedule = simulation.schedule

    def of_rank(rank: int) -> dict[str, Any]:
        steps = [
            {"steps": list(map(str, steps_of(each.entry))), "begin": each.begin, "end": each.end}
            for each in simulation.ranks[rank]
        ]
        return {
            "stages": list(schedule.placement[rank]),
            "idle": simulation.idle(rank),
            "exposed": simulation.exposed(rank),
            "peak_live": costs.peak_live(schedule, rank),
            "constant_bytes": candidate.constant_bytes[rank],
            "activation_bytes": candidate.activation_bytes[rank],
            **({"entries": steps} if has_steps else {}),
        }

    return {
        "name": candidate.name,
        "chunks": schedule.num_chunks,
        "step": simulation.makespan,
        "bubble": simulation.bubble,
        "exposed": simulation.exposed_share,
        "peak_bytes": candidate.peak_bytes,
        "fits": candidate.fits,
        "ranks": list(map(of_rank, range(schedule.num_ranks))),
    }


def _time(value: float, has_seconds: bool) -> str:
    return in_seconds(value) if has_seconds else significant(value, 4)
