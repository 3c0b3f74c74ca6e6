"""`mindspeed-lite load`: how even experts and ranks were loaded, from the file that `--moe-record-load` wrote."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mindspeed_lite.parallel.balance import record as records

from . import terminal
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
    if options.last is not None and options.last < 1:
        return fail(PROGRAM, f"--last takes a number of steps, at least 1, not {options.last}")
    for flag, name in (("--plot", options.plot), ("--json", options.json)):
        if name and (problem := terminal.why_not_writable(name)):
            return fail(PROGRAM, f"{flag} {name}: {problem}")
    try:
        record = records.read(options.file)
    except records.RecordError as error:
        return fail(PROGRAM, error)
    except OSError as error:
        return fail(PROGRAM, f"{options.file}: cannot be read: {error.strerror or error}")
    if options.last is not None:
        record = record.last(options.last)
    balance = record.balance()
    print("\n".join(_text(record, balance, terminal.width(), terminal.has_color())))
    try:
        if options.json:
            steps = [each.step for each in record.steps]
            found = {**asdict(record.header), "first_step": steps[0], "last_step": steps[-1], "steps": len(steps)}
            found["balance"] = [asdict(each) for each in balance]
            Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
        if options.plot:
            from mindspeed_lite.bench import plot_load

            plot_load.draw(record, options.plot)
    except ImportError as error:
        return fail(PROGRAM, error)
    except OSError as error:  # the disk has become full
        return fail(PROGRAM, f"cannot be written: {error.strerror or error}")
    return 0


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
    parser = terminal.Parser(
        prog=PROGRAM,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", help="what --moe-record-load wrote")
    parser.add_argument("--last", type=int, metavar="N", help="only the last N steps")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw experts x layers, and the imbalance over time, as PNG (needs matplotlib)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the table as JSON")
    return parser
