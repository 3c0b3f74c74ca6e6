"""`mindspeed-lite bench-ops`: time operators against plain PyTorch and installed peers."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_lite.json_file import JsonFileError
from mindspeed_lite.ops.discovery import OPERATORS, cases

from . import terminal

if TYPE_CHECKING:
    from mindspeed_lite.ops.case import Problem

PROGRAM = "mindspeed-lite bench-ops"

DTYPES = ("bf16", "fp16", "fp32", "fp64")
# Peer as in --against -> module to test for, and how to install it.
PEERS = {
    "liger": ("liger_kernel", "pip install 'mindspeed-lite[compare]'"),
    "flash_attn": ("flash_attn", "pip install flash-attn"),
    "transformer_engine": ("transformer_engine", "pip install 'transformer-engine[pytorch]'"),
    "apex": ("fused_weight_gradient_mlp_cuda", "build NVIDIA Apex with its C++ extensions"),
}


class _UsageError(Exception):
    """What is wrong with the command, and what to do."""


def main(arguments: Sequence[str]) -> int:
    """Exit code 1 after a regression or failed operator, 2 for bad input, 130 after Ctrl-C."""
    options = _parser(list(arguments)).parse_args(list(arguments))
    try:
        _check_operators(options)
        for package in ("rich", "jinja2") if options.out is not None else ("rich",):
            if importlib.util.find_spec(package) is None:
                raise _UsageError(f"the report needs {package}: pip install 'mindspeed-lite[bench]'")
        # torch takes seconds to import.
        report = _measure(options, [*PROGRAM.split(), *arguments])
    except _UsageError as error:
        return terminal.fail(PROGRAM, error)
    except KeyboardInterrupt:
        return terminal.fail(PROGRAM, "interrupted before anything was measured", 130)
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
    if not any(contender["seconds"] for row in report["rows"] for contender in row["contenders"]):
        return terminal.fail(PROGRAM, f"nothing was measured: {_first_problem(report)}", 1)
    return 1 if any(finding["severity"] == "failure" for finding in report["findings"]) else 0


def _first_problem(report: dict[str, Any]) -> str:
    errors = (contender["error"] for row in report["rows"] for contender in row["contenders"] if contender["error"])
    return next(errors, "no case was chosen")


def _parser(arguments: Sequence[str] = ()) -> terminal.Parser:
    parser = terminal.Parser(
        prog=PROGRAM,
        description="Time every operator against plain PyTorch, torch.compile and installed peers\n"
        "(on a GPU: Liger-Kernel, flash-attn, Transformer Engine), forward and forward+backward.",
        epilog=_shapes() if {"-h", "--help"} & set(arguments) else None,
    )
    parser.add_argument(
        "--op", action="append", metavar="NAME", help=f"an operator ({', '.join(OPERATORS)}); repeatable; default: all"
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        action="extend",
        metavar="SHAPE",
        help="cases in place of the default ones; with more than one operator as NAME:SHAPE",
    )
    parser.add_argument("--device", choices=("cpu", "cuda", "npu"), help="default: the one a training run would take")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="default: %(default)s")
    parser.add_argument(
        "--against",
        nargs="+",
        choices=tuple(PEERS),
        metavar="PEER",
        help=f"these peers ({', '.join(PEERS)}), which must be there; default: on a GPU those installed",
    )
    parser.add_argument("--out", metavar="DIR", help="write report.json, report.md and report.html there")
    parser.add_argument("--compare", metavar="FILE", help="an earlier report.json; a regression is exit code 1")
    parser.add_argument("--quick", action="store_true", help="a small case of each, few rounds, no torch.compile")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def _shapes() -> str:
    width = max(map(len, OPERATORS))
    rows = ((name, cases(name)) for name in OPERATORS)
    return "shapes:\n" + "\n".join(
        f"  {name:{width}}  {declared.syntax}\n  {'':{width}}  for example {declared.cpu[0]}" for name, declared in rows
    )


def _check_operators(options: argparse.Namespace) -> None:
    for name in options.op or ():
        if name not in OPERATORS:
            raise _UsageError(f"--op: {_unknown(name)}")
    names = list(dict.fromkeys(options.op or OPERATORS))
    chosen: dict[str, list[str] | None] = dict.fromkeys(names)
    if options.shapes:
        chosen = {}
        for given in options.shapes:
            name, colon, text = given.partition(":")
            if not colon:
                if len(names) > 1:
                    raise _UsageError(f"--shapes: whose is {given!r}? Add --op NAME, or write it as NAME:{given}")
                name, text = names[0], given
            if name not in names:
                reason = f"{name} is not among the --op given" if name in OPERATORS else _unknown(name)
                raise _UsageError(f"--shapes: {given!r}: {reason}")
            texts = chosen.setdefault(name, [])
            assert texts is not None
            texts.append(text)
    options.chosen = chosen


def _unknown(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, OPERATORS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"choose among {', '.join(OPERATORS)}"
    return f"there is no operator {name!r}; {hint}"


def _measure(options: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    from mindspeed_lite import platform
    from mindspeed_lite.bench import ceiling, output, timing
    from mindspeed_lite.bench.operators import earlier, run
    from mindspeed_lite.platform import allocator

    try:
        device = platform.choose(options.device)
    except platform.DeviceError as error:
        raise _UsageError(f"--device: {error}" if options.device else error) from error
    dtype = ceiling.DTYPES[options.dtype]
    _check_peers(options, device.name)
    chosen = _cases(options, device.name, dtype)
    try:
        before = None if options.compare is None else earlier.load(options.compare)
    except JsonFileError as error:
        raise _UsageError(f"--compare: {error}; give a report.json that this version of bench-ops wrote") from error
    try:
        if options.out is not None:
            output.check_writable(options.out)
    except output.OutputError as error:
        raise _UsageError(error) from error
    try:
        keep = allocator.wanted() == allocator.KEEP
    except ValueError as error:
        raise _UsageError(error) from error
    if keep and device.name == "cpu":
        allocator.keep_freed_memory()
    with ceiling.products_of_training(device.name), _progress() as tell:
        return run.run(
            chosen,
            device,
            dtype,
            timing.QUICK if options.quick else timing.Effort(),
            quick=options.quick,
            command=command,
            before=before,
            tell=tell,
        )


def _check_peers(options: argparse.Namespace, device: str) -> None:
    for peer in options.against or ():
        module, remedy = PEERS[peer]
        if importlib.util.find_spec(module) is None:
            raise _UsageError(f"--against {peer}: it is not installed: {remedy}")
        if device != "cuda":
            raise _UsageError(f"--against {peer}: its kernels need a CUDA device, and this is {device}; leave it out")


def _cases(options: argparse.Namespace, device: str, dtype: Any) -> list[Problem]:
    from mindspeed_lite.ops.case import COMPILED

    found: dict[tuple[str, str], Problem] = {}
    for name, texts in options.chosen.items():
        declared = cases(name)
        for text in declared.timed(device, options.quick) if texts is None else texts:
            try:
                problem = declared.problem(text, device, dtype, options.against)
            except ValueError as error:
                raise _UsageError(f"--shapes: {text!r} is no shape of {name}: {error}") from error
            if options.quick:
                # Compiling takes longer than everything else together.
                problem = problem.only(*(each.name for each in problem.contenders if each.name != COMPILED))
            found[name, problem.name] = problem
    for peer in options.against or ():
        if not any(each.name == peer for problem in found.values() for each in problem.contenders):
            raise _UsageError(f"--against {peer}: it has none of these operators: {', '.join(options.chosen)}")
    return list(found.values())


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    if not sys.stderr.isatty():
        yield lambda done, total, what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total, what: progress.update(task, completed=done, total=total, description=what)
