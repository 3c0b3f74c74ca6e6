"""Step time and memory of `--adaptive-memory`: `python -m benchmarks.adaptive_memory`.

    python -m benchmarks.adaptive_memory [--configuration NAME ...] [--rounds 8] [--page FILE]

Trains dense-medium, long and moe-small with all their features, a vocabulary of 4,096 and one micro-batch per rank.
Megatron's `--recompute-granularity` full and selective, and `--adaptive-memory` within the memory of each, train in
separate processes, in turns by steps. Then one training runs the plans chosen for shares of the full activation memory,
in turns by steps. A page gets the parts of the named configurations; its other parts stay.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.configurations import CONFIGURATIONS, DENSE, Configuration
from benchmarks.memory_plans import WORKER, Plan
from mindspeed_lite import platform
from mindspeed_lite.bench.statistics import paired_ratio
from mindspeed_lite.child_process import child_process, terminate

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
MOE = "moe_grouped_gemm,moe_permute_fusion,moe_router_fusion"
MEGATRON = {
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "selective": "--recompute-granularity selective",
}
# Steps of a process of its own before the one that is counted: the first is slower than the others, and
# `--adaptive-memory` records two and measures three at most.
FIRST_STEPS, RECORDED_STEPS = 1, 5
# Pairs of processes, of which one trains what is chosen: where memory lies makes one faster than another.
PAIRS = 2
# Their steps differ more than those of one process: so many times as many of them are timed.
OFTEN = 4
# What differs from the configurations of `benchmarks.configurations`: with a larger vocabulary the output layer, which
# no plan changes, takes most of a step.
SMALLER = {"--vocab-size": 4095}
BATCH = "--global-batch-size"
NAMES = ("dense-medium", "long", "moe-small")
# Whether the benchmark runs, with a model that takes seconds.
TRIAL = "trial"
HEAD = """# Memory by choice

`python -m benchmarks.adaptive_memory --page docs/benchmarks/adaptive-memory.md` writes this page, with
`--configuration NAME` one part. *Activations*: what autograd saves at the peak of a step on the fullest rank. Times are
medians of steps that alternate, with paired 95 % intervals. *Predicted*: from the recorded times."""
# By so much a budget may be exceeded, and a time be above the best.
TOLERANCE = 0.03


def main(given: Sequence[str] | None = None) -> int:
    """Train under all plans and print a table for each training."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adaptive_memory", description="Memory by choice.")
    told = f"{', '.join(NAMES)}, {TRIAL}"
    parser.add_argument("--configuration", nargs="+", choices=[*NAMES, TRIAL], default=NAMES, metavar="NAME", help=told)
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="timed steps of each plan (%(default)s)")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.3, 0.5, 0.7], help="budgets (%(default)s)")
    parser.add_argument("--page", metavar="FILE", help="the page whose parts are written")
    options = parser.parse_args(given)
    if options.rounds < 1 or not all(0 < each <= 1 for each in options.shares):
        parser.error("want --rounds of at least 1, --shares above 0 and up to 1")
    for name in options.configuration:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="adaptive-memory-") as cache:
            found = _trained(name, options.rounds, options.shares, cache)
        part = [
            f"{_configuration(name).about}. `--configuration {name} --rounds {options.rounds}` "
            f"on {platform.choose('cpu').describe()}, "
            f"{datetime.now(timezone.utc):%Y-%m-%d}, {time.monotonic() - began:.0f} s.",
            "",
            *found,
        ]
        print("\n".join(["", f"## {name}", "", *part]), flush=True)
        if options.page:
            page = Path(options.page)
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(page_of(parts(page.read_text()) if page.is_file() else {}, name, part))
    return 0


def parts(text: str) -> dict[str, str]:
    """The parts of a page by their configuration."""
    found = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)[1:]
    return {name: part.strip() for name, part in zip(found[::2], found[1::2], strict=True)}


def page_of(before: Mapping[str, str], name: str, part: Sequence[str]) -> str:
    """A page with its parts, that of `name` renewed."""
    now = {**before, name: "\n".join(part)}
    places = [each for each in (*NAMES, TRIAL) if each in now]
    return "\n\n".join([HEAD, *(f"## {each}\n\n{now[each]}" for each in places)]) + "\n"


def _trained(name: str, rounds: int, shares: Sequence[float], cache: str) -> list[str]:
    lines = ["| separate processes | activations | steps |", "| --- | ---: | ---: |"]
    said: list[str] = []
    losses: dict[str, list[str]] = {}
    for about, flags in MEGATRON.items():
        asked: dict[str, Any] = {"name": about, "planned": False, "counted": FIRST_STEPS, "rounds": rounds}
        (first,) = _run(name, [(flags, {**asked, "rounds": 1})], cache)
        asked["rounds"] = OFTEN * rounds
        within = f"--adaptive-memory --memory-budget {_plan(first['plans'][0]).peak / (1 << 30)}"
        megatron: list[Plan] = []
        chosen: list[Plan] = []
        traces = []
        for _ in range(PAIRS):
            pair = _run(name, [(flags, asked), (within, {**asked, "counted": RECORDED_STEPS})], cache)
            for found, plans in zip(pair, (megatron, chosen), strict=True):
                plans.append(_plan(found["plans"][0]))
                traces.append(found["losses"])
            print(f"{name}: {beside(megatron, chosen)}", flush=True)
        lines += alone(megatron, chosen)
        said.append(f"- {beside(megatron, chosen)} Losses: {_in_common(*traces)}.")
        losses[about] = traces[0]
    asked = {"planned": True, "shares": list(shares), "rounds": rounds}
    (found,) = _run(name, [("--adaptive-memory --memory-budget 1024", asked)], cache)
    told = f"all chosen plans have run after {found['chosen_steps']} steps."
    return [
        *lines,
        "",
        *said,
        "",
        *table([_plan(each) for each in found["plans"]]),
        *(
            f"- Losses against `--recompute-granularity {about}`: {_in_common(each, found['losses'])}; {told}"
            for about, each in losses.items()
        ),
    ]


def _in_common(*traces: Sequence[str]) -> str:
    count = min(map(len, traces))
    for at in range(count):
        if len({each[at] for each in traces}) > 1:
            return f"step {at + 1} DIFFERS"
    return f"the first {count} steps have the same bits"


def _plan(told: dict[str, Any]) -> Plan:
    return Plan(**{**told, "ways": ()})


def _run(name: str, trainings: Sequence[tuple[str, dict[str, Any]]], cache: str) -> list[dict[str, Any]]:
    """What the last rank of each training wrote; two take turns by steps. Kernels are built once, in `cache`."""
    configuration = _configuration(name)
    words = configuration.command()
    script = words[words.index("examples/pretrain_gpt.py") :]
    features = [f"--{each.replace('_', '-')}" for each in (DENSE + ("," + MOE if "moe" in name else "")).split(",")]
    start = [sys.executable]
    if configuration.processes > 1:
        start += ["-m", "torch.distributed.run", "--nproc-per-node", str(configuration.processes)]
        start += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory(prefix="adaptive-memory-") as shared, contextlib.ExitStack() as running:
        started = []
        for number, (flags, asked) in enumerate(trainings):
            folder = Path(shared) / str(number)
            folder.mkdir()
            told = {**asked, "folder": str(folder), **({"turns": shared, "turn": number} if len(trainings) > 1 else {})}
            environment = {**os.environ, WORKER: json.dumps(told), "PYTHONPATH": path, "MINDSPEED_LITE_CACHE": cache}
            threads = max(1, len(os.sched_getaffinity(0)) // configuration.processes)
            environment.setdefault("OMP_NUM_THREADS", str(threads))
            command = [*start, "-m", "benchmarks.memory_plans", *script[1:], *features, *flags.split()]
            output = running.enter_context((folder / "log.txt").open("w"))
            options: dict[str, Any] = {"env": environment, "cwd": ROOT, "stdout": output, "stderr": output}
            started.append(running.enter_context(child_process(command, terminate, **options)))
        while any(each.poll() is None for each in started) and not any(each.poll() for each in started):
            time.sleep(0.1)
        written = [sorted((Path(shared) / str(number)).glob("rank*.json")) for number in range(len(trainings))]
        for number, ((flags, _), files, process) in enumerate(zip(trainings, written, started, strict=True)):
            if process.returncode or (process.returncode == 0 and len(files) < configuration.processes):
                lines = (Path(shared) / str(number) / "log.txt").read_text().strip().splitlines()
                wrong = [each for each in lines if "Error: " in each or "adaptive_memory" in each]
                reason = (wrong or lines or ["no output"])[-1]
                raise SystemExit(f"{name} {flags}: status {process.returncode}: {reason}")
        return [json.loads(files[-1].read_text()) for files in written]


def _configuration(name: str) -> Configuration:
    if name == TRIAL:
        small = CONFIGURATIONS["tiny"][0]
        return Configuration(TRIAL, small.about, 1, small.flags.replace("--num-layers 1", "--num-layers 3"), "")
    found = next(each for each in CONFIGURATIONS["cpu"] if each.name == name)
    flags, smaller = found.flags, {**SMALLER, BATCH: found.processes}
    for flag, value in smaller.items():
        flags = re.sub(rf"{flag} \d+", f"{flag} {value}", flags)
    about = f"{re.sub(', vocabulary [0-9,]+', '', found.about)}, vocabulary 4,096, one micro-batch on each rank"
    return replace(found, flags=flags, about=about)


def _median(plan: Plan) -> float:
    return statistics.median(plan.seconds)


def alone(megatron: Sequence[Plan], chosen: Sequence[Plan]) -> list[str]:
    """Rows of a table: Megatron's recomputation, and what is chosen within its memory; a step's median by process."""
    named = f"`--recompute-granularity {megatron[0].name}`"
    return [
        f"| {about} | {', '.join(dict.fromkeys(_mib(each.peak) for each in runs))} "
        f"| {', '.join(f'{_median(each):.3f} s' for each in runs)} |"
        for about, runs in ((named, megatron), (f"chosen within that of {named}", chosen))
    ]


def beside(megatron: Sequence[Plan], chosen: Sequence[Plan]) -> str:
    """Whether what is chosen within Megatron's memory keeps to it and is faster."""
    used = max(each.peak for each in chosen) / megatron[0].peak
    steps = [[step for plan in plans for step in plan.seconds] for plans in (chosen, megatron)]
    found = paired_ratio(*steps)
    assert found is not None
    return (
        f"Chosen within that of {megatron[0].name}: the budget is {_held(used)}, {found.words(3)} of its time"
        f"{'' if found.ratio <= 1 else ' (MISSED)'}."
    )


def _held(used: float) -> str:
    return f"{'kept to' if used <= 1 + TOLERANCE else 'NOT kept to'} ({used:.1%})"


def table(plans: Sequence[Plan]) -> list[str]:
    """Plans of one training, the first of which keeps everything."""
    everything = plans[0]
    lines = ["| budget | activations | saved | step | over everything kept | predicted |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: |")
    for each in plans:
        about = f"{each.name} ({_mib(each.budget)})" if each.budget else each.name
        if not each.peak:
            lines.append(f"| {about} | cannot be met | | | | |")
            continue
        missed = " (MISSED)" if each.budget and each.peak > each.budget * (1 + TOLERANCE) else ""
        longer = _median(each) / _median(everything)
        lines.append(
            f"| {about} | {_mib(each.peak)}{missed} | {1 - each.peak / everything.peak:.1%} | {_median(each):.3f} s "
            f"| {longer:.3f} | {1 + each.longer / _median(everything):.3f} |"
        )
    return [*lines, ""]


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB" if size else ""


if __name__ == "__main__":
    sys.exit(main())
