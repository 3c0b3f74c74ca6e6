"""`mindspeed-lite load`: how even experts and ranks were loaded, from the file that `--moe-record-load` wrote."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from mindspeed_lite.json_file import JsonFileError
from mindspeed_lite.parallel.balance import record as records

from . import load_files, terminal
from .terminal import fail

PROGRAM = "mindspeed-lite load"

DESCRIPTION = """\
Prints, for each layer with experts, how even their load was in the steps that FILE holds, the file that a training
with --moe-record-load FILE appends to; it may be read while the training runs."""

EPILOG = """\
examples:
  mindspeed-lite load moe_load.jsonl
  mindspeed-lite load moe_load.jsonl --last 100 --plot moe_load.png

exit code: 0; 2 for bad input."""

_LEGEND = (
    ("experts", "max / mean of the experts' tokens: mean of the steps, and the worst step; 1 is even"),
    ("variation", "standard deviation / mean of the experts' tokens, mean of the steps"),
    ("idle", "experts without a token in all of these steps"),
    ("ranks", "max / mean of the ranks' tokens, mean of the steps"),
    ("dropped", "share of the router's choices that capacity dropped"),
)


def main(arguments: Sequence[str]) -> int:
    """Print the table, and write what is asked for; returns the exit code."""
    options = _parser().parse_args(list(arguments))
    problem = load_files.problem(options, {})
    if problem:
        return fail(PROGRAM, problem)
    try:
        record = load_files.read(options)
    except JsonFileError as error:
        return fail(PROGRAM, error)
    balance = record.balance()
    print("\n".join(_text(record, balance, terminal.width(), terminal.has_color())))
    steps = [each.step for each in record.steps]
    found = {**asdict(record.header), "first_step": steps[0], "last_step": steps[-1], "steps": len(steps)}
    found["balance"] = [asdict(each) for each in balance]
    return load_files.write(PROGRAM, options, found, lambda plots, file: plots.draw(record, file))


def _text(record: records.LoadRecord, balance: Sequence[records.LayerBalance], columns: int, color: bool) -> list[str]:
    header = record.header
    rows = [
        (
            record.label(each.layer),
            f"{each.imbalance:.2f}",
            f"{each.worst:.2f}",
            f"{each.variation:.2f}",
            str(each.idle),
            f"{each.rank_imbalance:.2f}",
            f"{100 * each.dropped:.1f} %",
        )
        for each in balance
    ]
    headers = ("layer", "experts", "worst", "variation", "idle", "ranks", "dropped")
    copies = f", {header.replicas} times" if header.replicas > 1 else ""
    steps = [each.step for each in record.steps]
    return [
        f"{len(steps)} steps, {steps[0]} to {steps[-1]}: {header.experts} experts, {header.topk} of them for a token, "
        f"over {header.expert_parallel} ranks{copies}",
        "",
        *(terminal.table(headers, rows, columns, color, [0] * len(headers)) or ()),
        "",
        *terminal.labelled(_LEGEND, columns, color, indent=0),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = terminal.Parser(prog=PROGRAM, description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("file", metavar="FILE", help="what --moe-record-load wrote")
    load_files.add_files(parser, "experts x layers, and the imbalance over time", "table")
    return parser
