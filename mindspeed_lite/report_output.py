"""Writes the report to a terminal or file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mindspeed_lite.engine import Option, OptionError, Report, Settings

VERBOSE = "verbose"
REPORT = Option(
    "--mindspeed-lite-report",
    help="Write what was swapped and why the rest was not to FILE: as text where its name ends in .txt, else as JSON. "
    f"The word {VERBOSE} prints it in place of the summary (rank 0).",
    default=None,
    metavar=f"FILE|{VERBOSE}",
)


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def report_file(settings: Settings) -> str | None:
    given: str | None = settings[REPORT.dest]
    return None if given == VERBOSE else given


def check_path(path: str | None) -> None:
    """Check before any change that the report can be written."""
    if path is None or rank() != 0:
        return
    place = Path(path)
    if place.is_dir() or not os.access(place if place.exists() else place.absolute().parent, os.W_OK):
        raise OptionError(f"{REPORT.flag} {path}: cannot be written there; give a file in a folder that exists.")


def write(report: Report, path: str) -> None:
    """Write the report to a file. Raises OptionError."""
    try:
        text = report.to_text(verbose=True) if path.endswith(".txt") else report.to_json() + "\n"
        Path(path).write_text(text)
    except OSError as error:
        raise OptionError(f"{REPORT.flag} {path}: cannot be written ({error}).") from error


def show(report: Report, settings: Settings) -> None:
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    verbose = settings[REPORT.dest] == VERBOSE
    details = "" if verbose else report_file(settings) or f"{REPORT.flag} {VERBOSE}"
    text = report.to_text(color=color, verbose=verbose, details=details)
    rule = "-" * 40
    print(f"{rule} mindspeed_lite\n{text}{rule}", flush=True)
