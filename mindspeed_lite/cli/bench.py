"""`mindspeed-lite bench`: compares a training command with features off and on."""

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
from .terminal import CommandError, bounded, option

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mindspeed_lite.bench.training import Benchmark

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
    options, command = _parser().parse_with_command(arguments)
    if reason := _why_not(options, command):
        raise CommandError(reason)
    for package in ("rich", "jinja2", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise CommandError(f"{package} is not installed: pip install 'mindspeed-lite[bench]'")

    from mindspeed_lite.bench import output, training
    from mindspeed_lite.bench.harness import Job

    folder = Path(options.out or time.strftime("mindspeed-lite-bench-%Y%m%d-%H%M%S")).absolute()
    features, beside = _names(options.features), _names(options.beside)
    is_new = not folder.exists()
    try:
        training.check_features([*features, *beside])
        output.check_writable(folder)
    except (training.BenchError, output.OutputError) as error:
        raise CommandError(error) from error
    scripts = [word for word in command if word.endswith((".py", ".sh"))]
    job = Job(
        command=tuple(command),
        folder=folder,
        warmup=options.warmup,
        steps=options.steps,
        timeout=options.timeout,
        allocator=options.allocator or "",
        beside=beside,
    )
    benchmark = training.Benchmark(
        job,
        title=options.title or Path(scripts[0] if scripts else command[0]).name,
        mode=options.mode or "features",
        features=features,
        repeats=options.repeats,
        baseline=options.rounding_baseline == "auto",
        profile=not options.no_profile,
        trace=options.trace,
    )
    return _measure(benchmark, folder, is_new)


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in (text or "").split(",") if name.strip()))


def _measure(benchmark: Benchmark, folder: Path, is_new: bool) -> int:
    from mindspeed_lite.bench.training import BenchError

    ended: CommandError | None = None
    code = 0
    with _shown() as show:
        benchmark.show = show
        try:
            benchmark.run()
        except KeyboardInterrupt:
            code = 130
        except BenchError as error:
            last = benchmark.outcomes[-1]
            ended = CommandError(f"{error} (log: {folder / last.log})", 1)
    if not benchmark.outcomes:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise CommandError("ended before the first run was finished; there is nothing to report", 130)
    report = benchmark.report()
    _write(report, folder)
    if ended is not None:
        if last.log_tail:
            print("\n".join([f"--- the end of {last.log}", *last.log_tail, "---"]), file=sys.stderr)
        raise ended
    return code or int(any(finding["severity"] == "failure" for finding in report["findings"]))


def _write(report: dict[str, Any], folder: Path) -> None:
    from mindspeed_lite.bench import output
    from mindspeed_lite.bench import report as pages

    report["files"]["trace"] = sorted(str(path.relative_to(folder)) for path in folder.glob("trace/*/*.json"))
    output.write(report, folder)
    print(pages.text(report, terminal.width(), terminal.has_color()), end="")
    where = os.path.relpath(folder)
    print(f"\n{where}/: report.html, report.md, report.json, plots, and the log of every run")


@contextmanager
def _shown() -> Iterator[Callable[[str, int], None]]:
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        printed: list[str] = []

        def say(what: str, steps: int) -> None:
            if what not in printed[-1:]:
                printed.append(what)
                print(what, file=sys.stderr, flush=True)

        yield say
        return
    began = time.monotonic()
    # A live display must not disturb measurements.
    with console.status("", refresh_per_second=2) as status:

        def show(what: str, steps: int) -> None:
            seconds = time.monotonic() - began
            status.update(f"{what}{f', step {steps}' if steps > 0 else ''}  {seconds // 60:.0f}:{seconds % 60:02.0f}")

        yield show


def _why_not(options: argparse.Namespace, command: Sequence[str]) -> str | None:
    if options.trace and options.no_profile:
        return "the trace is the profiler's: leave out --no-profile or --trace"
    if shutil.which(command[0]) is None:
        return f"there is no program {command[0]!r} to run"
    disable = os.environ.get("MINDSPEED_LITE_DISABLE", "").strip().lower()
    if disable not in ("", "0", "false", "no", "off"):
        return "MINDSPEED_LITE_DISABLE is set, so no feature could be turned on: unset it"
    return None


def _parser() -> terminal.Parser:
    parser = terminal.Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [options] -- COMMAND ...",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    which = parser.add_mutually_exclusive_group()
    option(which, "--features A,B", "these features, together")
    which.add_argument(
        "--each", dest="mode", action="store_const", const="each", help="every feature that applies alone, then all"
    )
    which.add_argument("--all", dest="mode", action="store_const", const="all", help="every feature that applies")
    which.add_argument(
        "--noise", dest="mode", action="store_const", const="noise", help="off against off: what is noise here"
    )
    option(parser, "--beside A,B", "these features in every arm, off too")
    option(parser, "--repeats N", "runs of each arm", bounded(int, 1), 3)
    option(parser, "--warmup K", "steps not measured", bounded(int, 0), 3)
    option(parser, "--steps N", "measured steps", bounded(int, 2), 10)
    option(parser, "--out DIR", "where reports and logs go (default: a new folder here)")
    option(parser, "--timeout S", "seconds without a step after which a run has hung",
           bounded(float, 0, above=True), 600.0)  # fmt: skip
    parser.add_argument(
        "--rounding-baseline", choices=("auto", "none"), default="auto",
        help="auto: where losses differ, run off in float32, or in float32 with sums in another order, to compare the "
        "difference with (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--allocator", choices=("keep", "system"),
        help="on the CPU, for all arms: keep freed memory or give it back (default: as the command has it)",
    )  # fmt: skip
    option(parser, "--trace", "write Chrome traces of the profiled step")
    option(parser, "--no-profile", "no breakdown of where the time went")
    option(parser, "--title TEXT", "heading of the report (default: the script's name)")
    return parser
