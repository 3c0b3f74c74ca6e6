"""`mindspeed-lite balance-lengths`: what `--balance-sequence-lengths` gains for a data set or for drawn documents."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, pstdev

from mindspeed_lite.parallel.balance.length_simulation import (
    GeneratedLengths,
    LengthOutcome,
    read_index,
    sample_costs,
    shuffled,
    simulate,
)

from . import generated, terminal
from .terminal import fail

PROGRAM = "mindspeed-lite balance-lengths"

DESCRIPTION = """\
Packs the documents of INDEX, the .idx file of a data set, or drawn ones, into sequences as training does, and shows the
attention cost of the slowest data-parallel rank: in the order that sequences come in, with --balance-sequence-lengths,
and the least that any assignment has."""

EPILOG = """\
examples:
  mindspeed-lite balance-lengths corpus_text_document.idx --seq-length 8192 --ranks 8 --global-batch-size 128
  mindspeed-lite balance-lengths --generate tail=1.4 shortest=16 --seq-length 8192 --ranks 4 --global-batch-size 48

exit code: 0; 2 for bad input."""

# With a smaller exponent a drawn length may exceed what a float holds.
_LEAST_TAIL = 0.1
_LEGEND = (
    ("each step", "slowest rank over that of equal ranks, where ranks wait for each other at the end of a step"),
    ("each micro-batch", "the same where they wait in every micro-batch: --expert-model-parallel-size above 1"),
)


def main(arguments: Sequence[str]) -> int:
    """Print the table, and write what is asked for; returns the exit code."""
    options = _parser().parse_args(list(arguments))
    problem = _problem(options)
    if problem:
        return fail(PROGRAM, problem)
    try:
        if options.generate is None:
            documents = shuffled(read_index(options.index), options.seed)
        else:
            given = generated.read(GeneratedLengths, options.generate, {"tail": _LEAST_TAIL})
            documents = GeneratedLengths(**{"longest": options.seq_length, "seed": options.seed, **given}).draw()
        samples = options.steps * options.global_batch_size
        costs = sample_costs(documents, options.seq_length, samples, options.seed)
        outcomes = simulate(costs, options.ranks, options.global_batch_size, options.micro_batch_size)
    except (ValueError, OverflowError) as error:
        return fail(PROGRAM, error)
    except OSError as error:
        return fail(PROGRAM, f"{options.index}: cannot be read: {error.strerror or error}")
    print("\n".join(_text(options, costs, outcomes)))
    if options.json:
        try:
            Path(options.json).write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n")
        except OSError as error:  # the disk has become full
            return fail(PROGRAM, f"cannot be written: {error.strerror or error}")
    return 0


def _problem(options: argparse.Namespace) -> str | None:
    """What is wrong with the options, or None."""
    if (options.index is None) == (options.generate is None):
        return "takes an INDEX or --generate, one of them"
    for flag in ("seq_length", "ranks", "global_batch_size", "micro_batch_size", "steps"):
        if getattr(options, flag) < 1:
            return f"--{flag.replace('_', '-')} takes a number of at least 1, not {getattr(options, flag)}"
    if options.json and (problem := terminal.why_not_writable(options.json)):
        return f"--json {options.json}: {problem}"
    return None


def _text(options: argparse.Namespace, costs: Sequence[int], outcomes: Sequence[LengthOutcome]) -> list[str]:
    columns, color = terminal.width(), terminal.has_color()
    rows = [(each.name, f"{each.step:.4f}", f"{each.micro_batch:.4f}") for each in outcomes]
    headers = ("assignment", "each step", "each micro-batch")
    before, after, waiting, bound = outcomes
    each = options.global_batch_size // (options.micro_batch_size * options.ranks)
    return [
        f"{options.steps} steps of {options.global_batch_size} sequences of {options.seq_length} tokens, {each} "
        f"micro-batches for each of {options.ranks} ranks; cost of a sequence: standard deviation / mean "
        f"{pstdev(costs) / fmean(costs):.2f}",
        "",
        *(terminal.table(headers, rows, columns, color, [0] * len(headers)) or ()),
        "",
        *terminal.labelled(_LEGEND, columns, color, indent=0),
        "",
        f"attention of the slowest rank {before.step / after.step:.2f}x faster, "
        f"{100 * (after.step / bound.step - 1):.1f} % above the lower bound",
        f"with waits in each micro-batch {before.micro_batch / waiting.micro_batch:.2f}x faster, "
        f"{100 * (waiting.micro_batch / bound.micro_batch - 1):.1f} % above the lower bound",
    ]


def _parser() -> argparse.ArgumentParser:
    parser = terminal.Parser(prog=PROGRAM, description=DESCRIPTION, epilog=EPILOG)
    add = parser.add_argument
    add("index", metavar="INDEX", nargs="?", help="the .idx file of a data set")
    add("--generate", nargs="*", metavar="NAME=NUMBER",
        help="drawn documents instead: shortest, tail (exponent of a Pareto distribution), longest, seed")  # fmt: skip
    add("--seq-length", type=int, default=8192, metavar="N", help="tokens of a sequence (8192)")
    add("--ranks", type=int, default=4, metavar="N", help="data-parallel ranks (4)")
    add("--global-batch-size", type=int, default=48, metavar="N", help="sequences of a step (48)")
    add("--micro-batch-size", type=int, default=1, metavar="N", help="sequences of a micro-batch (1)")
    add("--steps", type=int, default=50, metavar="N", help="steps that are simulated (50)")
    add("--seed", type=int, default=1234, metavar="N", help="of draws and shuffles (1234)")
    add("--json", metavar="FILE", help="write the outcomes as JSON")
    return parser
