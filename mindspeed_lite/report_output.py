"""Writes the report to a terminal or file."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from mindspeed_lite.engine import Entry, Option, OptionError, Report, Settings

VERBOSE = "verbose"
REPORT = Option(
    "--mindspeed-lite-report",
    help="Write what was swapped and why the rest was not to FILE: as text where its name ends in .txt, else as JSON. "
    f"The word {VERBOSE} prints it in place of the summary (rank 0).",
    default=None,
    metavar=f"FILE|{VERBOSE}",
)
_WIDTH = 100


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
        text = to_text(report, verbose=True) if path.endswith(".txt") else report.to_json() + "\n"
        Path(path).write_text(text)
    except OSError as error:
        raise OptionError(f"{REPORT.flag} {path}: cannot be written ({error}).") from error


def show(report: Report, settings: Settings) -> None:
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    verbose = settings[REPORT.dest] == VERBOSE
    details = "" if verbose else report_file(settings) or f"{REPORT.flag} {VERBOSE}"
    text = to_text(report, color=color, verbose=verbose, details=details)
    rule = "-" * 40
    print(f"{rule} mindspeed_lite\n{text}{rule}", flush=True)


def to_text(report: Report, width: int = _WIDTH, color: bool = False, verbose: bool = False, details: str = "") -> str:
    """Active features, one line each, and notices.

    Args:
        verbose: add targets and reasons of features that are off.
        details: where to find more, for the first line.
    """
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    written = io.StringIO()
    console = Console(file=written, width=width, force_terminal=color, color_system="standard" if color else None)

    def section(style: str, title: str, texts: Iterable[str], indent: int = 2) -> None:
        texts = list(filter(None, texts))
        if title and texts:
            console.print(Text(title, style))
        for text in texts:
            console.print(Padding(Text(text), (0, 0, 0, indent), expand=False))

    on, skipped, off = (
        [each for each in report.entries if each.status == status] for status in ("applied", "skipped", "off")
    )
    features = [each for each in on if each.flags]
    device_layer = ", ".join(each.feature for each in on if not each.flags)
    unrequested = [each.feature for each in off if not each.reasons]
    counts = [f"{len(features)} feature{'' if len(features) == 1 else 's'} on"]
    counts += [f"{len(skipped)} asked for and not applied"] if skipped else []
    counts += [f"{len(off)} off"] if off else []
    about = [", ".join(f"{name} {version}" for name, version in report.versions.items()), f"device {report.device}"]
    section("green", ", ".join(counts) + (f"; details: {details}" if details else ""), about, indent=0)
    if verbose:
        for each in on:
            section("", "", [_heading(each)])
            section("", "", _details(each), indent=4)
        section("", "off, not asked for", [", ".join(unrequested)])
    else:
        table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
        for name in ("feature", "numerics", "backend", "targets"):
            table.add_column(name, no_wrap=True)
        table.add_column("flags")
        for each in features:
            table.add_row(each.feature, each.numerics, _backend(each), _targets(each), Text(" ".join(each.given)))
        if features:
            console.print(Padding(table, (0, 0, 0, 2)))
        section("", "device layer", [device_layer])
    section("yellow", f"skipped ({len(skipped)})", _reasons(skipped))
    section("dim", f"off ({len(off) - len(unrequested)})", _reasons(off) if verbose else [])
    section("yellow", "fallbacks", [f"{each.feature}: {each.reason}" for each in report.fallbacks])
    section("cyan", "verification", [each.to_text() for each in report.verifications])
    section("cyan", "notices", report.notices)
    return "".join(f"{line.rstrip()}\n" for line in written.getvalue().splitlines())


def _backend(entry: Entry) -> str:
    names = {each.rpartition(":")[2] for each in entry.backends}
    return names.pop() if len(names) == 1 else ", ".join(entry.backends)


def _targets(entry: Entry) -> str:
    unknown = sum(each.verified.startswith("unverified") for each in entry.patches)
    count = len(entry.patches)
    return f"{unknown} of {count} unverified" if unknown else f"{count} verified"


def _heading(entry: Entry) -> str:
    backends = f"; by {', '.join(entry.backends)}" if entry.backends else ""
    return " ".join([entry.feature, *entry.given, f"[{entry.numerics}{backends}]"])


def _details(entry: Entry) -> list[str]:
    return [
        *(f"{each.how} {each.target} ({each.verified})" for each in entry.patches),
        *(f"sets {name} = {value}" for name, value in entry.arguments.items()),
    ]


def _reasons(entries: Iterable[Entry]) -> list[str]:
    return [f"{each.feature}: {'; '.join(each.reasons)}" for each in entries if each.reasons]
