"""What the pages of benchmarks share: the machine that they ran on, and the file."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

from mindspeed_lite.platform import cpu

# Of the minute before the benchmark, which computes itself from here on.
LOAD = os.getloadavg()[0]


def machine() -> str:
    """The sentence on the processor, and on what else ran."""
    return f"On {cpu.describe()}, at a load average of {LOAD:.1f} in the minute before."


def command(name: str, arguments: Sequence[str] | None) -> str:
    """The words that ran a benchmark of this name."""
    return shlex.join(["python", "-m", f"benchmarks.{name}", *(sys.argv[1:] if arguments is None else arguments)])


def write(options: argparse.Namespace, text: str) -> None:
    """Print the page, and write it where `--page` says."""
    print(text)
    if options.page is not None:
        options.page.parent.mkdir(parents=True, exist_ok=True)
        options.page.write_text(text)


def ms(seconds: float) -> str:
    """Milliseconds, for a cell."""
    return f"{1e3 * seconds:.0f} ms"


def rate(megabits: float | None) -> str:
    """The rate of a link, for a cell."""
    return "as fast as it goes" if megabits is None else f"{megabits:g} Mbit/s"


def row(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def links(modelled: str | None) -> str:
    """How links are made: in the kernel, or modelled for a reason."""
    return "network namespaces" if modelled is None else f"links modelled by delays ({modelled})"
