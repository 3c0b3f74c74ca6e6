"""The harness of all benchmarks: options, arms in turn, and a page with one table.

A module declares a `Benchmark` and runs it: `python -m benchmarks.NAME [--OPTION VALUE ...] [--tiny] [--page FILE]`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.ranks import Rates
from mindspeed_lite.bench import harness as bench
from mindspeed_lite.bench.plan import Arm
from mindspeed_lite.bench.wording import seconds
from mindspeed_lite.platform import cpu

ROOT = Path(__file__).resolve().parent.parent
# Of the minute before the benchmark, which adds to it from here on.
LOAD = os.getloadavg()[0]

Options = argparse.Namespace
Row = dict[str, Any]
Columns = Mapping[str, Callable[[Row], str]]


@dataclass(frozen=True)
class Benchmark:
    """What is measured, and the columns of its table.

    Attributes:
        name: the module's.
        about: two sentences for the page; `{name}` is the value of an option.
        columns: the cell of a row by the column's head.
        measure: returns the rows.
        options: defaults by name; a list takes several values.
        tiny: defaults of `--tiny`, with which a run takes seconds.
        choices: of options.
        note: below the table.
        finish: writes what belongs to the page, such as a picture.
    """

    name: str
    title: str
    about: str
    columns: Columns
    measure: Callable[[Options], list[Row]]
    options: Mapping[str, Any]
    tiny: Mapping[str, Any]
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    note: str = ""
    finish: Callable[[Path, Options, list[Row]], None] | None = None

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Measure, print the page, and write it where `--page` says."""
        given = [*(sys.argv[1:] if arguments is None else arguments)]
        options = self._parser("--tiny" in given).parse_args(given)
        rows = self.measure(options)
        text = self.page(options, rows, shlex.join(["python", "-m", f"benchmarks.{self.name}", *given]))
        print(text)
        if options.page is not None:
            options.page.parent.mkdir(parents=True, exist_ok=True)
            options.page.write_text(text)
            if self.finish is not None:
                self.finish(options.page, options, rows)
        return 0

    def _parser(self, tiny: bool) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{self.name}", description=self.title)
        for name, default in {**self.options, **(self.tiny if tiny else {})}.items():
            several = isinstance(default, list)
            parser.add_argument(
                f"--{name.replace('_', '-')}",
                type=type(default[0] if several else default),
                default=default,
                nargs="+" if several else None,
                choices=self.choices.get(name),
                help="default: %(default)s",
            )
        parser.add_argument("--tiny", action="store_true", help="sizes with which a run takes seconds")
        parser.add_argument("--page", type=Path, metavar="FILE", help="the page to write")
        return parser

    def page(self, options: Options, rows: Sequence[Row], command: str) -> str:
        """The page in Markdown."""
        parts = [
            f"# {self.title}",
            f"`{command}`",
            f"On {cpu.describe()}, at a load average of {LOAD:.1f} in the minute before. "
            f"{self.about.format(**vars(options))}",
            "\n".join(table(self.columns, rows)),
        ]
        return "\n\n".join([*parts, *([self.note] if self.note else [])]) + "\n"


def table(columns: Columns, rows: Sequence[Row]) -> list[str]:
    """A table in Markdown."""
    return markdown([*columns], [[cell(row) for cell in columns.values()] for row in rows])


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table of cells."""
    return [f"| {' | '.join(each)} |" for each in (header, ["---"] * len(header), *rows)]


def over_shares(
    shares: Sequence[float], rates: Rates, sent: Callable[[], float], measure: Callable[[], Row]
) -> list[Row]:
    """Measure with links as fast as they go, and so slow that `sent()` bytes take shares of the computation.

    Computation is what off takes without its waits, on fast links; a collective call.
    """
    rows: list[Row] = []
    computing = 0.0
    for share in (None, *shares):
        megabits = None if share is None else round(8e-6 * sent() / (share * computing), 1)
        megabits, _ = rates.set(megabits)
        measured = measure()
        if share is None:
            computing = measured["seconds"]["off"] - measured["waited"]["off"]
        rows.append({"share": share, "rate": megabits, **measured})
    rates.set(None)
    return rows


def train(command: Sequence[str], folder: Path, steps: int, warmup: int = 2, memory: bool = False) -> bench.Outcome:
    """One training in processes of its own; `memory` counts bytes in each step, which takes time.

    Raises SystemExit if it fails.
    """
    job = bench.Job(tuple(command), folder, warmup, steps, 600.0, "keep", memory=memory)
    outcome = bench.run(job, Arm("as given", "given"), 1)
    if outcome.status != "ok":
        raise SystemExit(f"{shlex.join(command)}: {outcome.reason}: {' | '.join(outcome.log_tail[-3:])}")
    return outcome


def launcher(processes: int) -> list[str]:
    """The beginning of a training command."""
    if processes == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]


def rate(megabits: float | None) -> str:
    """The rate of a link, for a cell."""
    return "as fast as it goes" if megabits is None else f"{megabits:g} Mbit/s"


# Columns of what `lab.ranks.compare` finds of the arms off and on.
OFF_ON: Columns = {
    "off": lambda row: seconds(row["seconds"]["off"]),
    "on": lambda row: seconds(row["seconds"]["on"]),
    "off / on": lambda row: row["ratio"],
}
WAITS: Columns = {
    "waits off": lambda row: seconds(row["waited"]["off"]),
    "waits on": lambda row: seconds(row["waited"]["on"]),
    "waits hidden": lambda row: "" if row["rate"] is None else f"{1 - row['waited']['on'] / row['waited']['off']:.0%}",
}
# Of `over_shares`.
LINK: Columns = {
    "messages over computation": lambda row: "" if row["share"] is None else f"{row['share']:g}",
    "link": lambda row: rate(row["rate"]),
}
RATIOS = "Medians of the slowest rank, in turn (A B A B); ratios with their 95 % interval."
