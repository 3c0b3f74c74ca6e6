"""Options, one-line errors, tables and progress of all commands; piped, a table row is one line."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from mindspeed_lite import text_layout

T = TypeVar("T", int, float)

Progress = Callable[[int, int, str], None]


class CommandError(Exception):
    def __init__(self, message: object, code: int = 2) -> None:
        super().__init__(" ".join(str(message).split()))
        self.code = code


class _Help(argparse.HelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(reflowed(text, width)) + "\n"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return text_layout.wrapped(" ".join(text.split()), width)

    def _format_usage(self, *given: Any) -> str:
        return "\n".join(text_layout.wrapped(super()._format_usage(*given).rstrip(), self._width)) + "\n\n"


def reflowed(text: str, columns: int) -> list[str]:
    """Lines of a docstring; paragraphs are joined, indented lines are commands or `name  meaning`."""
    lines = []
    for paragraph in re.sub(r"(?<=[^\n:])\n(?=\S)", " ", text.strip()).split("\n"):
        label = re.match(r" +\S.*? {2,}(?=\S)", paragraph)
        if label and len(paragraph) > columns:
            first, *others = text_layout.wrapped(paragraph[label.end() :], columns, label.end())
            lines += [label[0] + first.strip(), *others]
        elif paragraph.startswith(" "):
            lines += text_layout.command(paragraph, columns)
        else:
            lines += text_layout.wrapped(paragraph, columns)
    return lines


class Parser(argparse.ArgumentParser):
    """Parser with one-line errors and no abbreviated flags.

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
            program, None, description, "".join(epilog), formatter_class=_Help,
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
        raise CommandError(f"{message} (see {self.prog} --help)")


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
        if is_new:  # another rank may have removed it
            path.unlink(missing_ok=True)
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
    text = f"{program}: error: {' '.join(str(message).split())}"
    print("\n".join(text_layout.wrapped(text, text_layout.columns(sys.stderr))), file=sys.stderr)
    return code


def width() -> int:
    return text_layout.columns(sys.stdout, 100)


def has_color() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def say(text: str = "", style: str = "") -> None:
    for line in text_layout.wrapped(text, text_layout.columns(sys.stdout)):
        print(text_layout.painted(line, style, has_color()))


def show_command(words: Sequence[str]) -> None:
    """Print flags or a command to paste, indented."""
    print("\n".join(text_layout.command(f"  {shlex.join(words)}", text_layout.columns(sys.stdout))))


@contextlib.contextmanager
def progress(what: str) -> Iterator[Progress]:
    """Show (done, total, current) on stderr, seldom enough for measurements; nothing without a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total, what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
    columns = (SpinnerColumn(), BarColumn(12), MofNCompleteColumn(), TimeElapsedColumn(), text)
    out = Console(stderr=True)
    with Progress(*columns, console=out, transient=True, refresh_per_second=2) as display:
        task = display.add_task(what, total=None)
        yield lambda done, total, what: display.update(task, completed=done, total=total or None, description=what)


def table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", styles: Mapping[str, str] | None = None
) -> None:
    """Print aligned columns; styles: text of a cell -> style."""
    if title:
        say(f"\n{title}\n", "bold")
    style = (lambda cell: (styles or {}).get(cell, "")) if has_color() else None
    for line in text_layout.table(headers, rows, text_layout.columns(sys.stdout), style):
        print(line)
