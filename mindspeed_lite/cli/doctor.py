"""`mindspeed-lite doctor`: can training start here, what is missing, and how to get it; and does the device compute.

The self-test (`--selftest`, `--npu-selftest`) is of the room bench; what is here is its command.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import npu_probe, terminal
from .checks import Row, examine, found

PROGRAM = "mindspeed-lite doctor"

_STYLE = {
    "ok": "green", "note": "yellow", "problem": "red", "fallback": "yellow", "failed": "red",
}  # fmt: skip
_OUT = "selftest.json"


def main(arguments: Sequence[str]) -> int:
    """Print the findings; 0 when training can start, 1 when something stands in its way.

    With a self-test: 0 when every check passed, 1 when one failed, 2 when there is no such device.
    """
    parser = _parser()
    options = parser.parse_args(list(arguments))
    testing = options.selftest or options.npu_selftest
    if not testing and (options.quick or options.out is not None):
        parser.error(f"{'--quick' if options.quick else '--out'} belongs to --selftest or --npu-selftest")
    found.npu_seconds = options.timeout
    return _selftest(options) if testing else _examination(options)


def _parser() -> terminal.Parser:
    parser = terminal.Parser(
        prog=PROGRAM,
        description="What is there, what is missing and how to get it; with a self-test, whether the device computes\n"
        "what it should.",
        epilog="exit codes: 0 training can start (self-test: every check passed), 1 it cannot (one failed),\n"
        "2 bad options or no such device.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    tests = parser.add_mutually_exclusive_group()
    tests.add_argument(
        "--selftest",
        action="store_true",
        help="run every operator on the device that training would take, against float64 and plain PyTorch, and "
        "the device itself; a minute or two",
    )
    tests.add_argument("--npu-selftest", action="store_true", help="the same on an Ascend NPU, or why there is none")
    parser.add_argument("--out", metavar="FILE", help=f"the self-test's report (default: {_OUT})")
    parser.add_argument("--quick", action="store_true", help="self-test: few and tiny cases")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=npu_probe.SECONDS,
        metavar="SECONDS",
        help="how long torch_npu may take to answer (default: %(default)g)",
    )
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


_seconds.__name__ = "number of seconds"  # what argparse calls it in its error


def _examination(options: argparse.Namespace) -> int:
    rows = examine()
    problems = sum(row.status == "problem" for row in rows)
    if options.json:
        document = {"schema_version": 1, "ready": not problems, "rows": [asdict(row) for row in rows]}
        print(json.dumps(document, indent=2))
    else:
        print("\n".join(_lines(rows, problems)))
    return 1 if problems else 0


def _lines(rows: list[Row], problems: int) -> list[str]:
    color = terminal.has_color()
    verdict = (
        f"{problems} problem{'s' if problems > 1 else ''}: training cannot start here yet."
        if problems
        else "Training can start."
    )
    table = _table([(row.status, row.check, row.text + (f"\n-> {row.fix}" if row.fix else "")) for row in rows])
    return [*table, "", terminal.paint(verdict, "red" if problems else "green", color)]


def _table(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Status, what it is about, and a text wrapped beside them."""
    columns, color = terminal.width(), terminal.has_color()
    left = max(len(name) for _, name, _ in rows) + 2
    lines = []
    for status, name, text in rows:
        for number, line in enumerate(terminal.wrap(text, columns - left - 9)):
            label = terminal.paint(status, _STYLE[status], color) + " " * (9 - len(status))
            head = f"{label}{name:{left}}" if number == 0 else " " * (9 + left)
            lines.append((head + line).rstrip())
    return lines


def _selftest(options: argparse.Namespace) -> int:
    try:
        device = _device(options.npu_selftest)
        out = _out(options.out or _OUT)
    except _CannotStart as error:
        return terminal.fail(PROGRAM, error)
    from mindspeed_lite.bench import output, selftest

    facts = {key: value for key, value in found.npu().facts.items() if key != "backends"} if device == "npu" else {}
    try:
        report = selftest.run(device, quick=options.quick, facts=facts, tell=_tell)
    except KeyboardInterrupt:
        return terminal.fail(PROGRAM, "interrupted; nothing is written", 130)
    output.write_file(out, output.dumps(report))
    if options.json:
        print(output.dumps(report), end="")
    else:
        print("\n".join(_result(report, out)))
    return 0 if report["passed"] else 1


class _CannotStart(Exception):
    """Why there is no self-test, and what to do."""


def _device(npu: bool) -> str:
    """The device to test."""
    torch, error = found.torch()
    if torch is None:
        raise _CannotStart(f"a self-test needs torch: {error}")
    if npu:
        trouble = found.npu().trouble
        if trouble is not None:
            raise _CannotStart(f"--npu-selftest: {trouble}")
        return "npu"
    chosen, candidates, error = found.device()
    if not chosen:
        listed = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in candidates if reasons)
        raise _CannotStart(f"--selftest: {error}. {listed}")
    return chosen


def _out(name: str) -> Path:
    """The report's file, in a folder that can be written; asked before minutes of testing."""
    problem = terminal.why_not_writable(name)
    if problem is not None:
        raise _CannotStart(f"--out {name}: {problem}")
    return Path(name)


def _tell(done: int, total: int, what: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{done}/{total} {what}"[: terminal.width()], end="" if what else "\r\x1b[K", file=sys.stderr)


def _result(report: dict[str, Any], out: Path) -> list[str]:
    from mindspeed_lite.bench import selftest

    checks = report["checks"]
    failed = sum(each["status"] == "failed" for each in checks)
    verdict = f"{failed} of {len(checks)} checks failed" if failed else f"All {len(checks)} checks passed"
    verdict += f" on {report['device']}, {sum(each['seconds'] for each in checks):.0f} s."
    lines = [*_table(selftest.lines(report)), ""]
    lines.append(terminal.paint(verdict, "red" if failed else "green", terminal.has_color()))
    if report["to_report"]:
        lines += ["", f"To report, with {out}:", *(f"  {line}" for line in report["to_report"])]
    return [*lines, f"written: {out}"]
