"""What commands on recorded loads share: the file they read, their checks, and the files they write."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mindspeed_lite.parallel.balance import record as records

from . import terminal


def add_files(parser: argparse.ArgumentParser, plot: str, found: str) -> None:
    """Add --last, --plot and --json; `plot` and `found` say what is drawn and written."""
    parser.add_argument("--last", type=int, metavar="N", help="only the last N steps")
    parser.add_argument("--plot", metavar="FILE", help=f"draw {plot}, as PNG (needs matplotlib)")
    parser.add_argument("--json", metavar="FILE", help=f"write the {found} as JSON")


def problem(options: argparse.Namespace, least: Mapping[str, int]) -> str | None:
    """What is wrong with numbers and files of the options, or None.

    Args:
        least: the least value of options that are whole numbers, by name.
    """
    for name, bound in {"last": 1, **least}.items():
        value = getattr(options, name)
        if value is not None and value < bound:
            return f"--{name.replace('_', '-')} takes a number of at least {bound}, not {value}"
    for name in ("plot", "json"):
        file = getattr(options, name)
        if file and (reason := terminal.why_not_writable(file)):
            return f"--{name} {file}: {reason}"
    return None


def read(options: argparse.Namespace) -> records.LoadRecord:
    """The steps of FILE. Raises JsonFileError."""
    return last(records.read(options.file), options)


def last(record: records.LoadRecord, options: argparse.Namespace) -> records.LoadRecord:
    """Those of --last."""
    return record.last(options.last) if options.last else record


def write(program: str, options: argparse.Namespace, found: Mapping[str, Any], draw: Callable[[Any, str], None]) -> int:
    """Write what is asked for; returns the exit code. `draw` is given the module that draws, and the file."""
    try:
        if options.json:
            Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
        if options.plot:
            from mindspeed_lite.bench import plot_load

            draw(plot_load, options.plot)
    except ImportError as error:
        return terminal.fail(program, error)
    except OSError as error:  # the disk has become full
        return terminal.fail(program, f"cannot be written: {error.strerror or error}")
    return 0
