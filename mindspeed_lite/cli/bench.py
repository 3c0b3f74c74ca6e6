"""Runs COMMAND with features off and on in alternation, each time in fresh processes, and says how much faster and how
much smaller it is, whether the loss is the same, and where the time went. Neither the command nor the script is
changed: features are turned off and on after Megatron has parsed its arguments. Nothing is saved, evaluated or sent
to TensorBoard, and every run ends after its last measured step.

Without --features, --each or --all: the features that the command's own flags turn on, or all if it turns on none.

examples:
  mindspeed-lite bench -- torchrun --nproc-per-node 8 pretrain_gpt.py --use-flash-attn ...
  mindspeed-lite bench --each --repeats 5 --out report -- torchrun --nproc-per-node 8 pretrain_gpt.py ...

exit code: 0; 1 where a training is not the same, crashes or hangs; 2 for bad input; 130 after
Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_lite import error_exit

from . import terminal
from .terminal import CommandError, Parser, bounded, option, suggestion

if TYPE_CHECKING:
    from mindspeed_lite.bench.training import Benchmark


def add_options(parser: Parser) -> None:
    parser.reads_command = True
    parser.usage = "%(prog)s [options] -- COMMAND ..."
    which = parser.add_mutually_exclusive_group()
    option(which, "--features A,B", "these features, together", _names, ())
    for mode, help in (
        ("each", "every feature that applies alone, then all"),
        ("all", "every feature that applies"),
        ("noise", "off against off: what is noise here"),
    ):
        which.add_argument(f"--{mode}", dest="mode", action="store_const", const=mode, default="features", help=help)
    option(parser, "--beside A,B", "these features in every arm, off too", _names, ())
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
        "--allocator", choices=("keep", "system"), default="",
        help="on the CPU, for all arms: keep freed memory or give it back (default: as the command has it)",
    )  # fmt: skip
    option(parser, "--trace", "write Chrome traces of the profiled step")
    option(parser, "--no-profile", "no breakdown of where the time went")
    option(parser, "--title TEXT", "heading of the report (default: the script's name)")


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def main(options: argparse.Namespace) -> int:
    command = tuple(options.command)
    if options.trace and options.no_profile:
        raise CommandError("the trace is the profiler's: leave out --no-profile or --trace")
    if shutil.which(command[0]) is None:
        raise CommandError(f"there is no program {command[0]!r} to run")
    if error_exit.is_set("MINDSPEED_LITE_DISABLE"):
        raise CommandError("MINDSPEED_LITE_DISABLE is set, so no feature could be turned on: unset it")
    for package in ("jinja2", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise CommandError(f"{package} is not installed: pip install 'mindspeed-lite[bench]'")
    with terminal.progress("importing torch"):
        from mindspeed_lite import runtime
        from mindspeed_lite.bench import harness, output, training

        known = [feature.name for feature in runtime.catalogue()]
    for name in (*options.features, *options.beside):
        if name not in known:
            raise CommandError(f"there is no feature {name!r}; {suggestion(name, known)} (see mindspeed-lite features)")
    folder = Path(options.out or time.strftime("mindspeed-lite-bench-%Y%m%d-%H%M%S")).absolute()
    is_new = not folder.exists()
    output.check_writable(folder)
    scripts = [word for word in command if word.endswith((".py", ".sh"))]
    job = harness.Job(
        command, folder, options.warmup, options.steps, options.timeout, options.allocator, beside=options.beside
    )
    benchmark = training.Benchmark(
        job,
        title=options.title or Path(scripts[0] if scripts else command[0]).name,
        mode=options.mode,
        features=options.features,
        repeats=options.repeats,
        baseline=options.rounding_baseline == "auto",
        profile=not options.no_profile,
        trace=options.trace,
    )
    return _measure(benchmark, folder, is_new)


def _measure(benchmark: Benchmark, folder: Path, is_new: bool) -> int:
    from mindspeed_lite.bench import output, training
    from mindspeed_lite.bench import report as pages

    ended: training.BenchError | None = None
    code = 0
    job = benchmark.job
    with terminal.progress("starting") as show:
        benchmark.show = lambda what, step: show(step, job.warmup + job.steps, what)
        try:
            benchmark.run()
        except KeyboardInterrupt:
            code = 130
        except training.BenchError as error:
            ended = error
    if not benchmark.outcomes:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise CommandError("ended before the first run was finished; there is nothing to report", 130)
    report = benchmark.report()
    report["files"]["trace"] = sorted(str(path.relative_to(folder)) for path in folder.glob("trace/*/*.json"))
    output.write(report, folder)
    print(pages.text(report, terminal.width(), terminal.has_color()), end="")
    print(f"\n{os.path.relpath(folder)}/: report.html, report.md, report.json, plots, and the log of every run")
    if ended is not None:
        last = benchmark.outcomes[-1]
        if last.log_tail:
            print("\n".join([f"--- the end of {last.log}", *last.log_tail, "---"]), file=sys.stderr)
        raise CommandError(f"{ended} (log: {folder / last.log})", 1)
    return code or int(any(finding["severity"] == "failure" for finding in report["findings"]))
