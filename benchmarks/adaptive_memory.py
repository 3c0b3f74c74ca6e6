"""Step time and memory of `--adaptive-memory` beside other plans: `python -m benchmarks.adaptive_memory`.

    python -m benchmarks.adaptive_memory [--only NAME ...] [--rounds 3] [--others 4] [--shares ...] [--page FILE]

Trains dense-medium, long and moe-small with every feature of theirs on. Megatron's `--recompute-granularity` full and
selective train in processes of their own. Then one training runs what is chosen within shares of what everything takes
and within what these two take, and other plans within the same budgets, in turns by steps. Each is counted in one step
and timed in the others. About 13 minutes for each name on two cores; nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.configurations import CONFIGURATIONS, DENSE, Configuration
from benchmarks.memory_plans import CHOSEN, OTHER, WORKER, Plan

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
MOE = "moe_grouped_gemm,moe_permute_fusion,moe_router_fusion"
MEGATRON = {
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "selective": "--recompute-granularity selective",
}
# A step that is not timed, one that is counted, and some that are timed; their losses are compared with the others'.
ALONE_STEPS = 8
NAMES = ("dense-medium", "long", "moe-small")
# Whether the benchmark runs, with a model that takes seconds.
TRIAL = "trial"
# By so much a budget may be exceeded, and a time be above the best.
TOLERANCE = 0.03


def main(given: Sequence[str] | None = None) -> int:
    """Train under all plans and print a table for each training."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adaptive_memory", description="Memory by choice.")
    told = f"{', '.join(NAMES)}, {TRIAL}"
    parser.add_argument("--only", nargs="+", choices=[*NAMES, TRIAL], default=NAMES, metavar="NAME", help=told)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="timed steps of each plan (%(default)s)")
    parser.add_argument("--others", type=int, default=4, metavar="N", help="other plans of a budget (%(default)s)")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.3, 0.5, 0.7], help="budgets (%(default)s)")
    parser.add_argument("--page", metavar="FILE", help="the page to write")
    options = parser.parse_args(given)
    if options.rounds < 1 or options.others < 0 or not all(0 < each <= 1 for each in options.shares):
        parser.error("want --rounds of at least 1, --others of at least 0, --shares above 0 and up to 1")
    lines = [
        "# Benchmark: memory by choice",
        "",
        f"`python -m benchmarks.adaptive_memory --rounds {options.rounds} --others {options.others}` on "
        f"{len(os.sched_getaffinity(0))} cores. Activations are",
        "what autograd saves at the peak of a step, on the rank that takes most. A time is the median of the timed",
        "steps. Plans of one training took turns by steps; Megatron's own recomputation ran in processes of its own.",
        "Other plans are the first layers as a whole, all layers alike, and plans that were drawn.",
    ]
    for name in options.only:
        lines += ["", f"## {name}", "", *_trained(name, options.rounds, options.others, options.shares)]
        print("\n".join(lines[lines.index(f"## {name}") :]), flush=True)
    if options.page:
        Path(options.page).parent.mkdir(parents=True, exist_ok=True)
        Path(options.page).write_text("\n".join(lines) + "\n")
    return 0


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
    same = {about: _in_common(each, found["losses"]) for about, each in losses.items()}
    return [*table(plans, own), "", *(f"- Losses beside {about}: {each}" for about, each in same.items())]


def _in_common(one: Sequence[str], other: Sequence[str]) -> str:
    count = min(len(one), len(other))
    if one[:count] == other[:count]:
        return f"the first {count} steps have the same bits."
    return f"step {next(at for at in range(count) if one[at] != other[at]) + 1} DIFFERS."


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
    return next(each for each in CONFIGURATIONS["cpu"] if each.name == name)


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
        if not each.peak:
            lines.append(f"| {each.name}, chosen | {_mib(each.budget)} | cannot be met | | | | | |")
            continue
        rivals = _rivals(each, plans, own)
        best = min(map(_median, rivals)) if rivals else 0.0
        kept = f"{each.peak / each.budget:.1%}" if each.budget else ""
        about = f"{each.name}, chosen" if each.kind == CHOSEN else f"`--recompute-granularity {each.name}`"
        about = each.name if each.kind == OTHER or each is everything else about
        lines.append(
            f"| {about} | {_mib(each.budget)} | {_mib(each.peak)} | {kept} | {1 - each.peak / everything.peak:.1%} "
            f"| {_median(each):.3f} s | {_median(each) / _median(everything):.3f} "
            f"| {f'{_median(each) / best:.3f}' if best and each.kind == CHOSEN else ''} |"
        )
        if each.kind == CHOSEN:
            held = "kept to" if each.peak <= each.budget * (1 + TOLERANCE) else "NOT kept to"
            time = "nothing to compare with"
            if best:
                ratio = _median(each) / best
                time = f"{ratio:.3f} of the time of the best of {len(rivals)} other plans"
                time += "" if ratio <= 1 + TOLERANCE else " (MISSED)"
            said.append(f"- {each.name}: the budget is {held} ({kept}), {time}.")
    return [*lines, "", *said]


def _rivals(plan: Plan, plans: Sequence[Plan], own: Sequence[Plan]) -> list[Plan]:
    """Other plans that were measured within the budget of a chosen one."""
    within = plan.budget * (1 + TOLERANCE)
    others = [each for each in plans if each.kind == OTHER and each.budget == plan.budget]
    return [each for each in [*others, *own] if each.seconds and each.peak <= within]


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB" if size else ""


if __name__ == "__main__":
    sys.exit(main())
