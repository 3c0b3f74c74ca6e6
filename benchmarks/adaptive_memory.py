"""Step time and memory of `--adaptive-memory` beside other plans: `python -m benchmarks.adaptive_memory`.

    python -m benchmarks.adaptive_memory [--configuration NAME ...] [--rounds 8] [--others 20] [--page FILE]

Trains dense-medium, long and moe-small with every feature of theirs on, at a vocabulary of 4,096 and one micro-batch on
each rank. Megatron's `--recompute-granularity` full and selective, and `--adaptive-memory` within what each of them
takes, train in processes of their own, in turns. Then one training runs what is chosen within shares of what everything
takes, the least possible, and other plans within the same budgets, in turns by steps. Nothing else may run meanwhile. A
page gets the parts of the named configurations; its other parts stay.
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
from mindspeed_lite.bench.statistics import Ratio, paired_ratio

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
# Who trains in turn beside each of Megatron's, A B B A.
TURNS = ("Megatron", "chosen", "chosen", "Megatron")
# What differs from the configurations of `benchmarks.configurations`: with a larger vocabulary the output layer, which
# no plan changes, takes most of a step.
SMALLER = {"--vocab-size": 4095}
BATCH = "--global-batch-size"
NAMES = ("dense-medium", "long", "moe-small")
# Whether the benchmark runs, with a model that takes seconds.
TRIAL = "trial"
HEAD = f"""# Memory by choice

`python -m benchmarks.adaptive_memory --page docs/benchmarks/adaptive-memory.md` writes this page, and with
`--configuration NAME` one part of it. Activations are what autograd saves at the peak of a step, on the rank that takes
most. A time is the median of the timed steps. *Foreseen* is by what the record says that computing again takes. Plans
of one training took turns by steps; Megatron's own recomputation and what is chosen within its memory ran in processes
of their own, in turns. Other plans are the first or the last layers as a whole, all layers alike, the cheapest bytes
first, and plans that were drawn, without those that equal the chosen one. Each of them was timed once; the {FINALISTS}
fastest of each budget are in the tables, timed as often as the chosen ones. Intervals are of 95 %, paired by turns."""
# By so much a budget may be exceeded, and a time be above the best.
TOLERANCE = 0.03


def main(given: Sequence[str] | None = None) -> int:
    """Train under all plans and print a table for each training."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adaptive_memory", description="Memory by choice.")
    told = f"{', '.join(NAMES)}, {TRIAL}"
    parser.add_argument("--configuration", nargs="+", choices=[*NAMES, TRIAL], default=NAMES, metavar="NAME", help=told)
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="timed steps of each plan (%(default)s)")
    parser.add_argument("--others", type=int, default=20, metavar="N", help="other plans of a budget (%(default)s)")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.3, 0.5, 0.7], help="budgets (%(default)s)")
    parser.add_argument("--page", metavar="FILE", help="the page whose parts are written")
    options = parser.parse_args(given)
    if options.rounds < 1 or options.others < 0 or not all(0 < each <= 1 for each in options.shares):
        parser.error("want --rounds of at least 1, --others of at least 0, --shares above 0 and up to 1")
    for name in options.configuration:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="adaptive-memory-") as cache:
            found = _trained(name, options.rounds, options.others, options.shares, cache)
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


def _trained(name: str, rounds: int, others: int, shares: Sequence[float], cache: str) -> list[str]:
    said: list[str] = []
    own: list[Plan] = []
    losses: dict[str, list[str]] = {}
    for about, flags in MEGATRON.items():
        runs: dict[str, list[Plan]] = {"Megatron": [], "chosen": []}
        for turn in TURNS:
            asked: dict[str, Any] = {"name": about, "planned": False, "counted": FIRST_STEPS, "rounds": rounds}
            given = flags
            if turn == "chosen":
                given = f"--adaptive-memory --memory-budget {runs['Megatron'][0].peak / (1 << 30)}"
                asked |= {"name": f"that of {about}", "counted": RECORDED_STEPS}
            found = _run(name, given, asked, cache)
            plan = _plan(found["plans"][0])
            runs[turn].append(plan)
            print(f"{name}, {plan.name}: {plan.peak / MIB:.1f} MiB, {_median(plan):.3f} s", flush=True)
            before = losses.setdefault(about, found["losses"])
            said += (
                [] if turn == "Megatron" else [f"- Losses within {plan.name}: {_in_common(before, found['losses'])}."]
            )
        own += [_together(each) for each in runs.values()]
        said.append(_beside(*own[-2:]))
    asked = {"planned": True, "shares": list(shares), "others": others, "rounds": rounds}
    found = _run(name, "--adaptive-memory --memory-budget 1024", asked, cache)
    plans = [_plan(each) for each in found["plans"]]
    told = f"all chosen plans have run after {found['chosen_steps']} steps."
    same = {about: f"{_in_common(each, found['losses'])}; {told}" for about, each in losses.items()}
    return [
        *alone(own),
        *said,
        "",
        *table(plans),
        *(f"- Losses beside `--recompute-granularity {about}`: {each}" for about, each in same.items()),
    ]


def _together(runs: Sequence[Plan]) -> Plan:
    """Several processes as one plan, whose times are theirs."""
    seconds = [each for run in runs for each in run.seconds]
    return replace(runs[0], seconds=seconds, peak=max(run.peak for run in runs))


def _in_common(one: Sequence[str], other: Sequence[str]) -> str:
    count = min(len(one), len(other))
    if one[:count] == other[:count]:
        return f"the first {count} steps have the same bits"
    return f"step {next(at for at in range(count) if one[at] != other[at]) + 1} DIFFERS"


def _plan(told: dict[str, Any]) -> Plan:
    return Plan(**{**told, "ways": ()})


def _run(name: str, flags: str, asked: dict[str, Any], cache: str) -> dict[str, Any]:
    """What the last rank of a training wrote; kernels are built once, in `cache`."""
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
        environment |= {"MINDSPEED_LITE_CACHE": cache}
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


def alone(own: Sequence[Plan]) -> list[str]:
    """A table of plans that had processes of their own: Megatron's, each before what is chosen within its memory."""
    lines = ["| in processes of its own | activations | step |", "| --- | ---: | ---: |"]
    for number, each in enumerate(own):
        about = f"{each.name}, chosen" if number % 2 else f"`--recompute-granularity {each.name}`"
        lines.append(f"| {about} | {_mib(each.peak)} | {_median(each):.3f} s |")
    return [*lines, ""]


def _beside(megatron: Plan, chosen: Plan) -> str:
    held = "kept to" if chosen.peak <= megatron.peak * (1 + TOLERANCE) else "NOT kept to"
    ratio = _median(chosen) / _median(megatron)
    missed = "" if ratio <= 1 else " (MISSED)"
    return (
        f"- {chosen.name}: the budget is {held} ({chosen.peak / megatron.peak:.1%}), {ratio:.3f} of the time of "
        f"`--recompute-granularity {megatron.name}`{missed}."
    )


def table(plans: Sequence[Plan]) -> list[str]:
    """Lines of a table and what it says: plans of one training, the first of which keeps everything."""
    everything = plans[0]
    lines = [
        "| plan | budget | activations | saved | step | over everything kept | foreseen | over the best other |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    said = []
    for each in plans:
        about = f"{each.name}, chosen" if each.kind == CHOSEN else each.name
        if not each.peak:
            if each.kind == CHOSEN:
                lines.append(f"| {about} | {_mib(each.budget)} | cannot be met | | | | | |")
            continue
        rivals = _rivals(each, plans)
        saved, longer = 1 - each.peak / everything.peak, _median(each) / _median(everything)
        over = f"{_over_best(each, rivals).ratio:.3f}" if rivals and each.kind == CHOSEN else ""
        lines.append(
            f"| {about} | {_mib(each.budget)} | {_mib(each.peak)} | {saved:.1%} | {_median(each):.3f} s "
            f"| {longer:.3f} | {1 + each.longer / _median(everything):.3f} | {over} |"
        )
        if each.kind == CHOSEN:
            said.append(f"- {_verdict(each, plans, rivals)} {saved:.1%} less memory takes {longer:.3f} of the time.")
    return [*lines, "", *said]


def _verdict(plan: Plan, plans: Sequence[Plan], rivals: Sequence[Plan]) -> str:
    """Whether a chosen plan keeps to its budget and is as fast as the best of the others."""
    if not plan.budget:
        return f"{plan.name}:"
    held = "kept to" if plan.peak <= plan.budget * (1 + TOLERANCE) else "NOT kept to"
    held += f" ({plan.peak / plan.budget:.1%})"
    if not rivals:
        return f"{plan.name}: the budget is {held}, nothing to compare with."
    found = _over_best(plan, rivals)
    interval = "" if found.low is None else f" ({found.low:.3f} to {found.high:.3f})"
    once = [each for each in plans if each.kind == OTHER and each.budget == plan.budget and not each.peak]
    missed = "" if found.ratio <= 1 + TOLERANCE else " (MISSED)"
    return (
        f"{plan.name}: the budget is {held}, {found.ratio:.3f}{interval} of the time of the best of "
        f"{len(rivals) + len(once)} other plans{missed}."
    )


def _over_best(plan: Plan, rivals: Sequence[Plan]) -> Ratio:
    """The time of a plan over that of the fastest other one, by turns."""
    found = paired_ratio(plan.seconds, min(rivals, key=_median).seconds)
    assert found is not None
    return found


def _rivals(plan: Plan, plans: Sequence[Plan]) -> list[Plan]:
    """Other plans that were measured within the budget of a chosen one."""
    within = plan.budget * (1 + TOLERANCE)
    return [each for each in plans if each.kind == OTHER and 0 < each.peak <= within]


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB" if size else ""


if __name__ == "__main__":
    sys.exit(main())
