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
from .terminal import CommandError, bounded, option

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mindspeed_lite.bench.network import Links
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
    options, command = _parser().parse_with_command(arguments)
    if reason := _why_not(options, command):
        raise CommandError(reason)
    for package in ("rich", "jinja2", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise CommandError(f"{package} is not installed: pip install 'mindspeed-lite[bench]'")

    from mindspeed_lite.bench import training
    from mindspeed_lite.bench.harness import Job

    folder = Path(options.out or time.strftime("mindspeed-lite-bench-%Y%m%d-%H%M%S")).absolute()
    features, beside = _names(options.features), _names(options.beside)
    is_new = not folder.exists()
    try:
        training.check_features([*features, *beside])
        training.prepare_folder(folder)
    except training.BenchError as error:
        raise CommandError(error) from error
    scripts = [word for word in command if word.endswith((".py", ".sh"))]
    benchmark = training.Benchmark(
        training.Request(
            job=Job(
                command=tuple(command),
                folder=folder,
                warmup=options.warmup,
                steps=options.steps,
                timeout=options.timeout,
                allocator=options.allocator or "",
                links=_links(options),
            ),
            mode=options.mode or "features",
            features=features,
            beside=beside,
            repeats=options.repeats,
            rounding_baseline=options.rounding_baseline,
            profile=not options.no_profile,
            trace=options.trace,
            title=options.title or Path(scripts[0] if scripts else command[0]).name,
        )
    )
    return _measure(benchmark, folder, is_new)


def _links(options: argparse.Namespace) -> Links | None:
    if options.link_rate is None:
        return None
    from mindspeed_lite.bench import network

    between, *within = options.link_rate
    found = network.Links.of(between, within[0] if within else None, options.ranks_per_host)
    if found.modelled is not None:
        print(f"links are modelled: {found.modelled}", file=sys.stderr)
    return found


def _rates(text: str) -> tuple[float, ...]:
    """One rate or two; anything else is an argument error."""
    try:
        rates = tuple(float(each) for each in text.split(","))
    except ValueError:
        rates = ()
    if len(rates) not in (1, 2):
        raise argparse.ArgumentTypeError(f"one or two numbers, as 500 or 500,4000, not {text!r}")
    return rates


def _why_no_links(options: argparse.Namespace) -> str | None:
    """What is wrong with the request's links, or None."""
    if options.ranks_per_host < 1:
        return f"--ranks-per-host is at least 1, not {options.ranks_per_host}"
    if options.link_rate is None:
        return None if options.ranks_per_host == 1 else "--ranks-per-host is about --link-rate: give that too"
    for rate in options.link_rate:
        if not rate > 0:
            return f"--link-rate is a number of megabits a second above 0, not {rate:g}"
    if len(options.link_rate) == 2 and options.ranks_per_host == 1:
        return "--link-rate has a second rate, within hosts, and each rank has a host of its own: give --ranks-per-host"
    return None


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in (text or "").split(",") if name.strip()))


def _measure(benchmark: Benchmark, folder: Path, is_new: bool) -> int:
    """Run, write and print the report of what has finished; returns the exit code."""
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


def _lanes(folder: Path) -> list[Path]:
    """The picture of when ranks computed, waited and sent, off above on; none where nothing was recorded."""
    from mindspeed_lite.bench import timeline

    arms: dict[str, dict[int, list[timeline.Span]]] = {}
    # Off is run first.
    for path in sorted(folder.glob(f"trace/*/{timeline.LANES_OF}*.json"), key=lambda path: path.stat().st_mtime):
        rank = int(path.stem.removeprefix(timeline.LANES_OF))
        arms.setdefault(path.parent.name, {})[rank] = timeline.read_trace(path)
    if not arms:
        return []
    picture = folder / "trace" / "lanes.png"
    timeline.draw(picture, {arm: dict(sorted(ranks.items())) for arm, ranks in arms.items()}, "one step")
    return [picture]


def _write(report: dict[str, Any], folder: Path) -> None:
    from mindspeed_lite.bench import output
    from mindspeed_lite.bench import report as pages

    traces = [*folder.glob("trace/*/*.json"), *_lanes(folder)]
    report["files"]["trace"] = sorted(str(path.relative_to(folder)) for path in traces)
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


def _why_not(options: argparse.Namespace, command: Sequence[str]) -> str | None:
    """What is wrong with the request, or None."""
    if reason := _why_no_links(options):
        return reason
    if options.trace and options.no_profile and (device := _device()) != "cpu":
        return f"the trace of {device} is the profiler's: leave out --no-profile or --trace"
    if shutil.which(command[0]) is None:
        return f"there is no program {command[0]!r} to run"
    disable = os.environ.get("MINDSPEED_LITE_DISABLE", "").strip().lower()
    if disable not in ("", "0", "false", "no", "off"):
        return "MINDSPEED_LITE_DISABLE is set, so no feature could be turned on: unset it"
    return None


def _device() -> str:
    """The one that the processes of a run will choose."""
    from mindspeed_lite import platform

    try:
        return platform.choose().name
    except platform.DeviceError:
        return "cpu"  # they say what is wrong


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
        "--rounding-baseline", choices=("auto", "float32", "order", "none"), default="auto",
        help="what a difference of the loss is held against: off in float32, or with sums in another order; "
        "auto takes float32 where the training is in 16 bits",
    )  # fmt: skip
    parser.add_argument(
        "--allocator", choices=("keep", "system"),
        help="on the CPU, for all arms: keep freed memory or give it back (default: as the command has it)",
    )  # fmt: skip
    parser.add_argument(
        "--link-rate", type=_rates, metavar="MBIT[,MBIT]",
        help="on the CPU, for all arms: ranks as if on hosts of their own, joined by links of so many megabits a "
        "second; a second rate holds within hosts (Linux and root; elsewhere links are modelled)",
    )  # fmt: skip
    parser.add_argument(
        "--ranks-per-host", type=int, default=1, metavar="N",
        help="with --link-rate: adjacent ranks that share a host and its link (default %(default)s)",
    )  # fmt: skip
    option(parser, "--trace", "write Chrome traces of the profiled step; on CPU also of computing and waiting")
    option(parser, "--no-profile", "no breakdown of where the time went")
    option(parser, "--title TEXT", "heading of the report (default: the script's name)")
    return parser
