"""Step time and memory of `--adaptive-memory` beside other plans: `python -m benchmarks.adaptive_memory`.

    python -m benchmarks.adaptive_memory [--configuration NAME ...] [--rounds 4] [--others 20] [--page FILE]

Trains dense-medium, long and moe-small with every feature of theirs on, at a vocabulary of 4,096 and one micro-batch on
each rank. Megatron's `--recompute-granularity` full and selective train in processes of their own. Then one training
runs what is chosen within shares of what everything takes and within what these two take, the least possible, and other
plans within the same budgets, in turns by steps. On two cores dense-medium and moe-small take about 4 minutes, and long
about 10; nothing else may run meanwhile. A page gets the parts of the named configurations; its other parts stay.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.configurations import CONFIGURATIONS, DENSE, Configuration
from benchmarks.memory_plans import CHOSEN, FINALISTS, OTHER, WORKER, Plan
from mindspeed_lite.bench.calibration.run import processor

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
MOE = "moe_grouped_gemm,moe_permute_fusion,moe_router_fusion"
MEGATRON = {
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "selective": "--recompute-granularity selective",
}
# A step that is not timed, one that is counted, and some that are timed; their losses are compared with the others',
# whose chosen plans have all run by then.
ALONE_STEPS = 12
# What differs from the configurations of `benchmarks.configurations`: with a larger vocabulary the output layer, which
# no plan changes, takes most of a step.
SMALLER = {"--vocab-size": 4095}
BATCH = "--global-batch-size"
NAMES = ("dense-medium", "long", "moe-small")
# Whether the benchmark runs, with a model that takes seconds.
TRIAL = "trial"
HEAD = f"""# Benchmark: memory by choice

`python -m benchmarks.adaptive_memory --page docs/benchmarks/adaptive-memory.md` writes this page, and with
`--configuration NAME` one part of it. Activations are what autograd saves at the peak of a step, on the rank that takes
most. A time is the median of the timed steps. Plans of one training took turns by steps; Megatron's own recomputation
ran in processes of its own. Other plans are the first or the last layers as a whole, all layers alike, the cheapest
bytes first, and plans that were drawn. Each of them was timed once; the {FINALISTS} fastest of each budget are in the
tables, timed as often as the chosen ones."""
# By so much a budget may be exceeded, and a time be above the best.
TOLERANCE = 0.03


def main(given: Sequence[str] | None = None) -> int:
    """Train under all plans and print a table for each training."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adaptive_memory", description="Memory by choice.")
    told = f"{', '.join(NAMES)}, {TRIAL}"
    parser.add_argument("--configuration", nargs="+", choices=[*NAMES, TRIAL], default=NAMES, metavar="NAME", help=told)
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="timed steps of each plan (%(default)s)")
    parser.add_argument("--others", type=int, default=20, metavar="N", help="other plans of a budget (%(default)s)")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.3, 0.5, 0.7], help="budgets (%(default)s)")
    parser.add_argument("--page", metavar="FILE", help="the page whose parts are written")
    options = parser.parse_args(given)
    if options.rounds < 1 or options.others < 0 or not all(0 < each <= 1 for each in options.shares):
        parser.error("want --rounds of at least 1, --others of at least 0, --shares above 0 and up to 1")
    for name in options.configuration:
        began = time.monotonic()
        found = _trained(name, options.rounds, options.others, options.shares)
        part = [
            f"{_configuration(name).about}. `--configuration {name} --rounds {options.rounds} "
            f"--others {options.others}` on {processor()}, {len(os.sched_getaffinity(0))} cores, "
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


def _trained(name: str, rounds: int, others: int, shares: Sequence[float]) -> list[str]:
    own: list[Plan] = []
    losses: dict[str, list[str]] = {}
    for about, flags in MEGATRON.items():
        asked = {"name": about, "planned": False, "steps": ALONE_STEPS}
        found = _run(name, flags, asked)
        losses[about] = found["losses"]
        own.append(_plan(found["plans"][0]))
        print(f"{name}, {about}: {own[-1].peak / MIB:.1f} MiB, {_median(own[-1]):.3f} s", flush=True)
    peaks = {plan.name: plan.peak for plan in own}
    asked = {"planned": True, "shares": list(shares), "peaks": peaks, "others": others, "rounds": rounds}
    found = _run(name, "--adaptive-memory --memory-budget 1024", asked)
    plans = [_plan(each) for each in found["plans"]]
    chosen = f"all chosen plans have run after {found['chosen_steps']} steps."
    same = {about: f"{_in_common(each, found['losses'])} {chosen}" for about, each in losses.items()}
    return [
        *table(plans, own),
        *(f"- Losses beside `--recompute-granularity {about}`: {each}" for about, each in same.items()),
    ]


def _in_common(one: Sequence[str], other: Sequence[str]) -> str:
    count = min(len(one), len(other))
    if one[:count] == other[:count]:
        return f"the first {count} steps have the same bits;"
    return f"step {next(at for at in range(count) if one[at] != other[at]) + 1} DIFFERS;"


def _plan(told: dict[str, Any]) -> Plan:
    return Plan(**{**told, "ways": ()})


def _run(name: str, flags: str, asked: dict[str, Any]) -> dict[str, Any]:
    """What the last rank of a training wrote."""
    configuration = _configuration(name)
    words = configuration.command()
    script = words[words.index("examples/pretrain_gpt.py") :]
    features = [f"--{each.replace('_', '-')}" for each in (DENSE + ("," + MOE if "moe" in name else "")).split(",")]
    start = [sys.executable]
    if configuration.processes > 1:
        start += ["-m", "torch.distributed.run", "--nproc-per-node", str(configuration.processes)]
    with tempfile.TemporaryDirectory(prefix="adaptive-memory-") as folder:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, WORKER: json.dumps({**asked, "folder": folder}), "PYTHONPATH": path}
        environment |= {"MINDSPEED_LITE_CACHE": folder}
        environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // configuration.processes)))
        command = [*start, "-m", "benchmarks.memory_plans", *script[1:], *features, *flags.split()]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        found = [json.loads(each.read_text()) for each in sorted(Path(folder).glob("rank*.json"))]
    if len(found) < configuration.processes:
        lines = done.stderr.strip().splitlines()
        reason = [each for each in lines if "Error: " in each or "adaptive_memory" in each] or lines or ["no output"]
        raise SystemExit(f"{name} {flags}: status {done.returncode}: {reason[-1]}")
    last: dict[str, Any] = found[-1]
    return last


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


def table(plans: Sequence[Plan], own: Sequence[Plan]) -> list[str]:
    """Lines of a table and what it says: plans of one training, the first of which keeps everything, and Megatron's."""
    everything = plans[0]
    lines = [
        "| plan | budget | activations | of the budget | saved | step | over everything kept | over the best other |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    said = []
    for each in [*own, *plans]:
        about = f"{each.name}, chosen" if each.kind == CHOSEN else f"`--recompute-granularity {each.name}`"
        about = each.name if each.kind == OTHER or each is everything else about
        if not each.peak:
            if each.kind == CHOSEN:
                lines.append(f"| {about} | {_mib(each.budget)} | cannot be met | | | | | |")
            continue
        rivals = _rivals(each, plans, own)
        best = min(map(_median, rivals)) if rivals else 0.0
        kept = f"{each.peak / each.budget:.1%}" if each.budget else ""
        saved, longer = 1 - each.peak / everything.peak, _median(each) / _median(everything)
        over = f"{_median(each) / best:.3f}" if best and each.kind == CHOSEN else ""
        lines.append(
            f"| {about} | {_mib(each.budget)} | {_mib(each.peak)} | {kept} | {saved:.1%} "
            f"| {_median(each):.3f} s | {longer:.3f} | {over} |"
        )
        if each.kind == CHOSEN:
            said.append(
                f"- {_verdict(each, plans, rivals, kept)} {saved:.1%} less memory takes {longer:.3f} of the time."
            )
    return [*lines, "", *said]


def _verdict(plan: Plan, plans: Sequence[Plan], rivals: Sequence[Plan], kept: str) -> str:
    """Whether a chosen plan keeps to its budget and is as fast as the best of the others."""
    if not plan.budget:
        return f"{plan.name}:"
    held = "kept to" if plan.peak <= plan.budget * (1 + TOLERANCE) else "NOT kept to"
    if not rivals:
        return f"{plan.name}: the budget is {held} ({kept}), nothing to compare with."
    ratio = _median(plan) / min(map(_median, rivals))
    once = [each for each in plans if each.kind == OTHER and each.budget == plan.budget and not each.peak]
    count = len(rivals) + len(once)
    missed = "" if ratio <= 1 + TOLERANCE else " (MISSED)"
    time = f"{ratio:.3f} of the time of the best of {count} other plans{missed}"
    return f"{plan.name}: the budget is {held} ({kept}), {time}."


def _rivals(plan: Plan, plans: Sequence[Plan], own: Sequence[Plan]) -> list[Plan]:
    """Other plans that were measured within the budget of a chosen one."""
    within = plan.budget * (1 + TOLERANCE)
    others = [each for each in plans if each.kind == OTHER and each.budget == plan.budget]
    return [each for each in [*others, *own] if each.seconds and 0 < each.peak <= within]


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB" if size else ""


if __name__ == "__main__":
    sys.exit(main())
