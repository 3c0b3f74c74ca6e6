"""`mindspeed-lite bench`: the user's own training command with features off and on, side by side."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import terminal
from .terminal import fail

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mindspeed_lite.bench.training import Benchmark, Progress

PROGRAM = "mindspeed-lite bench"

DESCRIPTION = """\
Runs COMMAND with features off and on in alternation, each time in fresh processes, and says how much faster and how
much smaller it is, whether the loss is the same, and where the time went. Neither the command nor the script is
changed: features are turned off and on after Megatron has parsed its arguments. Nothing is saved, evaluated or sent
to TensorBoard, and every run ends after its last measured step.

Without --features, --each or --all: the features that the command's own flags turn on, or all if it turns on none."""

EPILOG = """\
examples:
  mindspeed-lite bench -- torchrun --nproc-per-node 8 pretrain_gpt.py --use-flash-attn ...
  mindspeed-lite bench --each --repeats 5 --out report -- torchrun --nproc-per-node 8 pretrain_gpt.py ...

exit code: 0; 1 where a training is not the same, crashes, hangs or leaks; 2 for bad input; 130 after
Ctrl-C or SIGTERM."""


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; returns the exit code."""
    own, command = _split(arguments)
    options = _parser().parse_args(own)
    if command is None or not command:
        return fail(
            PROGRAM, f"no command to measure; write it after `--`: {PROGRAM} -- torchrun ... pretrain_gpt.py ..."
        )
    reason = _why_not(options, command)
    if reason:
        return fail(PROGRAM, reason)
    for package in ("rich", "jinja2", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            return fail(PROGRAM, f"{package} is not installed: pip install 'mindspeed-lite[bench]'")

    from mindspeed_lite.bench import training
    from mindspeed_lite.bench.harness import Job

    folder = Path(options.out or time.strftime("mindspeed-lite-bench-%Y%m%d-%H%M%S")).absolute()
    features, beside = _names(options.features), _names(options.beside)
    is_new = not folder.exists()
    try:
        training.check_features([*features, *beside])
        training.prepare_folder(folder)
    except training.BenchError as error:
        return fail(PROGRAM, error)
    benchmark = training.Benchmark(
        training.Request(
            job=Job(
                command=tuple(command),
                folder=folder,
                warmup=options.warmup,
                steps=options.steps,
                timeout=options.timeout,
                allocator=options.allocator or "",
            ),
            mode=options.mode or "features",
            features=features,
            beside=beside,
            repeats=options.repeats,
            rounding_baseline=options.rounding_baseline,
            profile=not options.no_profile,
            trace=options.trace,
            title=options.title or _name(command),
        )
    )
    return _measure(benchmark, folder, is_new, training.BenchError)


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in (text or "").split(",") if name.strip()))


def _measure(benchmark: Benchmark, folder: Path, is_new: bool, error_type: type[Exception]) -> int:
    code = 0
    with _shown() as show:
        benchmark.show = show
        try:
            benchmark.run()
        except KeyboardInterrupt:
            code = 130
        except error_type as error:
            code = 1
            message = str(error)
    if not benchmark.outcomes:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        return fail(PROGRAM, "ended before the first run was finished; there is nothing to report", 130)
    report = benchmark.report()
    _write(report, folder)
    if code == 1:
        return _failed(benchmark, message)
    if code == 0 and any(finding["severity"] == "failure" for finding in report["findings"]):
        code = 1
    return code


def _failed(benchmark: Benchmark, message: str) -> int:
    """The end of the log of the run that stopped everything, then the one line that says why."""
    last = benchmark.outcomes[-1]
    if last.log_tail:
        print(f"--- the end of {last.log}", file=sys.stderr)
        print("\n".join(last.log_tail), file=sys.stderr)
        print("---", file=sys.stderr)
    return fail(PROGRAM, f"{message} (log: {benchmark.request.job.folder / last.log})", 1)


def _write(report: dict[str, Any], folder: Path) -> None:
    from mindspeed_lite.bench import output
    from mindspeed_lite.bench import report as pages

    report["files"]["trace"] = sorted(str(path.relative_to(folder)) for path in folder.glob("trace/*/*.json"))
    output.write(report, folder)
    print(pages.text(report, terminal.width(), terminal.has_color()), end="")
    where = os.path.relpath(folder)
    print(f"\n{where}/: report.html, report.md, report.json, plots, and the log of every run")


@contextmanager
def _shown() -> Iterator[Callable[[Progress], None]]:
    """Progress on stderr: a live line on a terminal, one line a run otherwise."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        said: set[tuple[int, str]] = set()

        def say(progress: Progress) -> None:
            if (progress.run, progress.note) not in said:
                said.add((progress.run, progress.note))
                print(_line(progress), file=sys.stderr, flush=True)

        yield say
        return
    began = time.monotonic()
    # Twice a second: a live display must not take time from what it shows.
    with console.status("", refresh_per_second=2) as status:
        notes: set[str] = set()

        def show(progress: Progress) -> None:
            if progress.note and ":" in progress.note and progress.note not in notes:
                notes.add(progress.note)
                console.print(progress.note, style="red", markup=False)
            seconds = time.monotonic() - began
            status.update(f"{_line(progress)}  {seconds // 60:.0f}:{seconds % 60:02.0f}")

        yield show


def _line(progress: Progress) -> str:
    of = f" of {progress.runs}" if progress.runs else ""
    if progress.note:
        return f"run {progress.run}{of}: {progress.note}"
    steps = f", step {progress.steps} of {progress.of_steps}" if progress.steps else ""
    return f"run {progress.run}{of}: {progress.arm}, repeat {progress.repeat}{steps}"


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Our own arguments and the command after the first `--`."""
    given = list(arguments)
    if "--" not in given:
        return given, None
    place = given.index("--")
    return given[:place], given[place + 1 :]


def _name(command: Sequence[str]) -> str:
    """The script that the command starts, or its program."""
    scripts = [word for word in command if word.endswith((".py", ".sh"))]
    return Path(scripts[0] if scripts else command[0]).name


def _why_not(options: argparse.Namespace, command: Sequence[str]) -> str | None:
    """What is wrong with the request, or None."""
    for name, least in (("repeats", 1), ("warmup", 0), ("steps", 2)):
        if getattr(options, name) < least:
            return f"--{name} is at least {least}, not {getattr(options, name)}"
    if options.timeout <= 0:
        return f"--timeout is a number of seconds above 0, not {options.timeout:g}"
    if options.trace and options.no_profile:
        return "--trace is the profiler's trace: leave out --no-profile or --trace"
    if shutil.which(command[0]) is None:
        return f"there is no program {command[0]!r} to run"
    disable = os.environ.get("MINDSPEED_LITE_DISABLE", "").strip().lower()
    if disable not in ("", "0", "false", "no", "off"):
        return "MINDSPEED_LITE_DISABLE is set, so no feature could be turned on: unset it"
    return None


def _parser() -> argparse.ArgumentParser:
    parser = terminal.Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [options] -- COMMAND ...",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--features", metavar="A,B", help="these features, together")
    which.add_argument(
        "--each", dest="mode", action="store_const", const="each", help="every feature that applies alone, then all"
    )
    which.add_argument("--all", dest="mode", action="store_const", const="all", help="every feature that applies")
    which.add_argument(
        "--noise", dest="mode", action="store_const", const="noise", help="off against off: what is noise here"
    )
    parser.add_argument("--beside", metavar="A,B", help="these features in every arm, off too")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each arm (default %(default)s)")
    parser.add_argument("--warmup", type=int, default=3, metavar="K", help="steps not measured (default %(default)s)")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="measured steps (default %(default)s)")
    parser.add_argument("--out", metavar="DIR", help="where reports and logs go (default: a new folder here)")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S",
        help="seconds without a step after which a run has hung (default %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--rounding-baseline", choices=("auto", "float32", "order", "none"), default="auto",
        help="what a difference of the loss is held against: off in float32, or with sums in another order; "
        "auto takes float32 where the training is in 16 bits",
    )  # fmt: skip
    parser.add_argument(
        "--allocator", choices=("keep", "system"),
        help="on the CPU, for all arms: keep freed memory or give it back (default: as the command has it)",
    )  # fmt: skip
    parser.add_argument(
        "--trace",
        action="store_true",
        help="write Chrome traces of the profiled step",
    )
    parser.add_argument("--no-profile", action="store_true", help="no breakdown of where the time went")
    parser.add_argument("--title", metavar="TEXT", help="heading of the report (default: the script's name)")
    return parser
