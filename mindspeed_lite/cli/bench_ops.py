"""Time every operator against plain PyTorch and torch.compile; forward and forward+backward."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_lite.ops.discovery import OPERATORS, cases

from . import terminal
from .terminal import CommandError, Parser, option, suggestion

if TYPE_CHECKING:
    from mindspeed_lite.ops.case import Problem

DTYPES = ("bf16", "fp16", "fp32", "fp64")


def add_options(parser: Parser) -> None:
    names = f"an operator ({', '.join(OPERATORS)}); repeatable; default: all"
    option(parser, "--op NAME", names, action="append")
    option(parser, "--shapes SHAPE", "cases in place of the default ones, with one --op", nargs="+", action="extend")
    option(parser, "--list", "print the operators and the form of their shapes")
    parser.add_argument("--device", choices=("cpu", "cuda", "npu"), help="default: the one a training run would take")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="default: %(default)s")
    option(parser, "--out DIR", "write report.json, report.md and report.html there")
    option(parser, "--quick", "a small case of each, few rounds, no torch.compile")
    option(parser, "--json", "print the report as JSON")


def main(options: argparse.Namespace) -> int:
    """Exit code 1 after a failed operator, 2 for bad input, 130 after Ctrl-C."""
    names = options.op or list(OPERATORS)
    if options.list:
        with terminal.progress("importing torch"):
            rows = [(name, cases(name).syntax, str(cases(name).cpu[0])) for name in OPERATORS]
        terminal.table(("operator", "shape", "for example"), rows)
        return 0
    for name in names:
        if name not in OPERATORS:
            raise CommandError(f"--op: there is no operator {name!r}; {suggestion(name, OPERATORS)}")
    if options.shapes and len(set(names)) > 1:
        raise CommandError("--shapes belongs to one operator: give it with one --op")
    if options.out is not None and importlib.util.find_spec("jinja2") is None:
        raise CommandError("the report needs jinja2: pip install 'mindspeed-lite[bench]'")
    with terminal.progress("importing torch") as tell:
        report = _measure(options, names, tell)
    from mindspeed_lite.bench import output
    from mindspeed_lite.bench import report as pages

    if options.json:
        print(output.dumps(report), end="")
    else:
        print(pages.text(report, terminal.width(), terminal.has_color()), end="")
    if options.out is not None:
        output.write(report, options.out)
        print(f"written: {options.out}/report.html, report.md, report.json", file=sys.stderr)
    if not report["complete"]:
        return 130
    contenders = [contender for row in report["rows"] for contender in row["contenders"]]
    if not any(each["seconds"] for each in contenders):
        error = next((each["error"] for each in contenders if each["error"]), "no case was chosen")
        raise CommandError(f"nothing was measured: {error}", 1)
    return 1 if any(finding["severity"] == "failure" for finding in report["findings"]) else 0


def _measure(options: argparse.Namespace, names: Sequence[str], tell: terminal.Progress) -> dict[str, Any]:
    from mindspeed_lite import platform
    from mindspeed_lite.bench import ceiling, output, timing
    from mindspeed_lite.bench.operators import run
    from mindspeed_lite.platform import allocator

    try:
        device = platform.choose(options.device)
    except platform.DeviceError as error:
        raise CommandError(f"--device: {error}" if options.device else error) from error
    dtype = ceiling.DTYPES[options.dtype]
    problems = _problems(options, names, device.name, dtype)
    if options.out is not None:
        output.check_writable(options.out)
    if allocator.wanted() == allocator.KEEP and device.name == "cpu":
        allocator.keep_freed_memory()
    effort = timing.QUICK if options.quick else timing.Effort()
    command = ["mindspeed-lite", "bench-ops", *options.given]
    with ceiling.products_of_training(device.name):
        return run.run(problems, device, dtype, effort, quick=options.quick, command=command, tell=tell)


def _problems(options: argparse.Namespace, names: Sequence[str], device: str, dtype: Any) -> list[Problem]:
    from mindspeed_lite.ops.case import COMPILED

    found: dict[tuple[str, str], Problem] = {}
    for name in names:
        declared = cases(name)
        for shape in options.shapes or declared.timed(device, options.quick):
            try:
                problem = declared.problem(shape, device, dtype)
            except ValueError as error:
                raise CommandError(f"--shapes: {shape!r} is no shape of {name}: {error}") from error
            if options.quick:
                # Compiling takes longer than everything else together.
                problem = problem.only(*(each.name for each in problem.contenders if each.name != COMPILED))
            found[name, problem.name] = problem
    return list(found.values())
