"""Options, one-line errors and rich tables of all commands; piped, a table row is one line."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T", int, float)

# Columns if piped: enough for the longest row.
PIPED_WIDTH = 10_000


class CommandError(Exception):
    def __init__(self, message: object, code: int = 2) -> None:
        super().__init__(" ".join(str(message).split()))
        self.code = code


class Parser(argparse.ArgumentParser):
    """Parser with one-line errors, verbatim texts, and no abbreviated flags.

    Attributes:
        reads_command: a training command follows `--`; `options.command` has its words.
        needs_command: it must.
        keeps_unknown: unknown words are in `options.unknown`; otherwise they are an error.
    """

    reads_command = False
    needs_command = True
    keeps_unknown = False

    def __init__(self, program: str, text: str) -> None:
        description, *epilog = re.split(r"^(?=examples:|exit codes?:)", text, maxsplit=1, flags=re.MULTILINE)
        super().__init__(
            program, None, description, "".join(epilog), formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )  # fmt: skip

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        place = arguments.index("--") if self.reads_command and "--" in arguments else len(arguments)
        command = arguments[place + 1 :]
        if self.reads_command and self.needs_command and not command and not {"-h", "--help"} & set(arguments):
            required = [f"{each.option_strings[0]} {each.metavar}" for each in self._actions if each.required]
            example = " ".join([self.prog, *required, "-- torchrun ... pretrain_gpt.py ..."])
            self.error(f"no command to read; write it after `--`: {example}")
        options, unknown = self.parse_known_args(arguments[:place])
        if unknown and not self.keeps_unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        options.unknown, options.given, options.command = unknown, arguments, command
        return options

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def option(
    parser: argparse._ActionsContainer, usage: str, help: str, type: Any = str, default: Any = None, **given: Any
) -> None:
    """Add `--flag METAVAR`, a switch without METAVAR."""
    flag, _, metavar = usage.partition(" ")
    if metavar:
        text = f"{help} (default: {default})" if default not in (None, "", ()) else help
        parser.add_argument(flag, metavar=metavar, help=text, type=type, default=default, **given)
    else:
        parser.add_argument(flag, action="store_true", help=help, **given)


def bounded(
    kind: Callable[[str], T], least: float, most: float = math.inf, *, above: bool = False
) -> Callable[[str], T]:
    """Option `type`: a finite number from `least` (`above`: exclusive) to `most`."""
    noun = "a whole number" if kind is int else "a number"
    bounds = f"{'above' if above else 'of at least'} {least:,.12g}"
    bounds += f" and at most {most:,.12g}" if most < math.inf else ""

    def read(text: str) -> T:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if (least < value if above else least <= value) and value <= most and value < math.inf:
                return value
        raise argparse.ArgumentTypeError(f"takes {noun} {bounds}, not {text[:40]!r}")

    return read


def output_file(name: str) -> str:
    """Option `type`: a file that can be written, checked before any work."""
    path = Path(name)
    is_new = not path.exists()
    try:
        if path.is_dir() or not path.absolute().parent.is_dir():
            problem = "it is a folder; give a file" if path.is_dir() else "there is no such folder"
            raise argparse.ArgumentTypeError(f"{name}: {problem}")
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{name}: it cannot be written: {error.strerror or error}") from None
    return name


@contextlib.contextmanager
def writing(flag: str, name: str) -> Iterator[None]:
    """Turn write errors, such as a full disk, into CommandError."""
    try:
        yield
    except ImportError as error:
        raise CommandError(f"{flag}: {error}; `mindspeed-lite doctor` says what is missing") from error
    except (OSError, ValueError) as error:
        raise CommandError(f"{flag} {name}: cannot be written: {getattr(error, 'strerror', None) or error}") from error


def write_json(name: str | None, value: Any) -> None:
    if name:
        with writing("--json", name):
            Path(name).write_text(json.dumps(value, indent=1) + "\n")


def suggestion(name: str, known: Collection[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"choose one of {', '.join(known)}"


def fail(program: str, message: object, code: int = 2) -> int:
    print(f"{program}: error: {' '.join(str(message).split())}", file=sys.stderr)
    return code


def width() -> int:
    return max(60, min(200, shutil.get_terminal_size((100, 24)).columns))


def has_color() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def console() -> Console:
    from rich.console import Console

    is_piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=PIPED_WIDTH if is_piped else None, highlight=False, markup=False, emoji=False)


def say(text: str = "", style: str | None = None) -> None:
    console().print(text, style=style)


@contextlib.contextmanager
def progress(is_logged: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """Show (done, total, current) on stderr, seldom enough for measurements.

    is_logged: without a terminal, print a line for each new `current`; otherwise nothing.
    """
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    out = Console(stderr=True)
    with Progress(
        *columns, console=out, transient=True, refresh_per_second=2, disable=not out.is_terminal
    ) as display:  # fmt: skip
        task = display.add_task("", total=None)

        def show(done: int, total: int, what: str) -> None:
            if is_logged and not out.is_terminal and what != display.tasks[task].description:
                print(what, file=sys.stderr, flush=True)
            display.update(task, completed=done, total=total, description=what)

        yield show


def table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", styles: Mapping[str, str] | None = None
) -> None:
    """Print aligned columns.

    Args:
        headers: no header line if all are empty.
        styles: text of a first cell -> style.
    """
    from rich.table import Table
    from rich.text import Text

    if title:
        say(f"\n{title}\n", "bold")
    out, cells = console(), list(rows)
    gap = 2 if out.width >= 100 else 1
    grid = Table(box=None, show_header=any(headers), header_style="bold", pad_edge=False, padding=(0, gap, 0, 0))
    for place, header in enumerate(headers):
        is_short = max((len(row[place]) for row in cells), default=0) <= 10
        grid.add_column(header, overflow="fold", no_wrap=is_short)
    for first, *others in cells:
        grid.add_row(Text(first, style=(styles or {}).get(first, "")), *map(Text, others))
    with out.capture() as captured:
        out.print(grid)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
