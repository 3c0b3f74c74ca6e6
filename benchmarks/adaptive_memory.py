"""Step time and memory of `--adaptive-memory` beside Megatron's recomputation: `python -m benchmarks.adaptive_memory`.

    python -m benchmarks.adaptive_memory [--only NAME ...] [--rounds 2] [--steps 4] [--shares 0.3 0.5 0.7] [--page FILE]

Trains dense-medium, long and moe-small with every feature of theirs on: everything kept, with
`--recompute-granularity` full and selective, within shares of what everything takes, and within what full and selective
take. What autograd saves is counted in one step, and steps behind it are timed. Every arm is a process, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.configurations import CONFIGURATIONS, DENSE

ROOT = Path(__file__).resolve().parent.parent
# Two steps are recorded and up to three are measured by the feature itself.
COUNTED_STEP = 6
GIB = 1 << 30
MOE = "moe_grouped_gemm,moe_permute_fusion,moe_router_fusion"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective"
WORKER = "MINDSPEED_LITE_BENCHMARK_OUT"


@dataclass
class Arm:
    """A way to train, what it took and what came of it; `budget` is 0 where there is none."""

    name: str
    flags: str = ""
    budget: int = 0
    seconds: list[float] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    peak: int = 0


def main(given: Sequence[str] | None = None) -> int:
    """Train all arms in turns and print a table for each training."""
    out = os.environ.get(WORKER)
    if out:
        return _work(Path(out))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adaptive_memory", description="Memory by choice.")
    names = ["dense-medium", "long", "moe-small"]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="processes of each arm (%(default)s)")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="timed steps of each (%(default)s)")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.3, 0.5, 0.7], help="budgets (%(default)s)")
    parser.add_argument("--page", metavar="FILE", help="the page to write")
    options = parser.parse_args(given)
    lines = [
        "# Benchmark: memory by choice",
        "",
        f"`python -m benchmarks.adaptive_memory --rounds {options.rounds} --steps {options.steps}`: activations are",
        "what autograd saves at the peak of a step, on the rank that takes most; times are the median and the fastest",
        "of all timed steps.",
    ]
    for name in options.only:
        lines += ["", f"## {name}", "", *_table(_trained(name, options.rounds, options.steps, options.shares))]
        print("\n".join(lines[-12:]), flush=True)
    if options.page:
        Path(options.page).parent.mkdir(parents=True, exist_ok=True)
        Path(options.page).write_text("\n".join(lines) + "\n")
    return 0


def _trained(name: str, rounds: int, steps: int, shares: Sequence[float]) -> list[Arm]:
    everything, full, selective = Arm("everything kept"), Arm("full", FULL), Arm("selective", SELECTIVE)
    arms = [everything, full, selective]
    for arm in arms:
        _run(name, arm, steps)
    for share in shares:
        arms.append(_budgeted(f"budget {share:.0%}", int(everything.peak * share)))
    arms += [_budgeted(f"budget of {arm.name}", arm.peak) for arm in (full, selective)]
    for arm in arms[3:]:
        _run(name, arm, steps)
    for _ in range(rounds - 1):
        for arm in arms:
            if arm.peak:
                _run(name, arm, steps)
    return arms


def _budgeted(name: str, budget: int) -> Arm:
    return Arm(name, f"--adaptive-memory --memory-budget {budget / GIB!r}", budget)


def _run(name: str, arm: Arm, steps: int) -> None:
    configuration = next(each for each in CONFIGURATIONS["cpu"] if each.name == name)
    words = configuration.command()
    script = words[words.index("examples/pretrain_gpt.py") :]
    features = [f"--{each.replace('_', '-')}" for each in (DENSE + ("," + MOE if "moe" in name else "")).split(",")]
    start = [sys.executable]
    if configuration.processes > 1:
        start += ["-m", "torch.distributed.run", "--nproc-per-node", str(configuration.processes)]
    with tempfile.TemporaryDirectory(prefix="adaptive-memory-") as folder:
        environment = {**os.environ, WORKER: folder, "MINDSPEED_LITE_CACHE": folder, "PYTHONPATH": _path()}
        environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // configuration.processes)))
        command = [*start, "-m", "benchmarks.adaptive_memory", *script[1:], *features, *arm.flags.split()]
        command += ["--exit-interval", str(COUNTED_STEP + steps)]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        found = [json.loads(each.read_text()) for each in sorted(Path(folder).glob("rank*.json"))]
    if len(found) < configuration.processes:
        reason = [each for each in done.stderr.splitlines() if "Error: " in each or "adaptive_memory" in each]
        print(f"{name}, {arm.name}: no figures: {reason[-1] if reason else done.returncode}", flush=True)
        return
    arm.peak = max(each["peak"] for each in found)
    arm.seconds += found[-1]["seconds"]
    arm.losses = found[-1]["losses"]
    print(f"{name}, {arm.name}: {arm.peak / GIB:.3f} GiB, {min(found[-1]['seconds']):.3f} s", flush=True)


def _path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def _table(arms: Sequence[Arm]) -> list[str]:
    base = arms[0]
    lines = [
        "| arm | budget | activations | of all | of the budget | median step | fastest | over all kept | losses |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for each in arms:
        if not each.peak:
            lines.append(f"| {each.name} | {_gib(each.budget)} | cannot be met | | | | | | |")
            continue
        median, fastest = statistics.median(each.seconds), min(each.seconds)
        lines.append(
            f"| {each.name} | {_gib(each.budget)} | {_gib(each.peak)} | {each.peak / base.peak:.1%} "
            f"| {f'{each.peak / each.budget:.1%}' if each.budget else ''} | {median:.3f} s | {fastest:.3f} s "
            f"| {median / statistics.median(base.seconds):.3f} | {'equal' if each.losses == base.losses else 'other'} |"
        )
    return lines


def _gib(size: int) -> str:
    return f"{size / GIB:.4f} GiB" if size else ""


class _Steps:
    """In a training process: counts one step, times those behind it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[str] = []
        self.peak = 0
        self._number = 0

    def around(self, wrapped: Callable[..., Any], session: Any) -> Callable[..., Any]:
        from mindspeed_lite.memory.saved_tensors import Tracker

        def train_step(*args: Any, **kwargs: Any) -> Any:
            self._number += 1
            if self._number == COUNTED_STEP:
                addresses = {each.untyped_storage().data_ptr() for chunk in args[2] for each in chunk.parameters()}
                with Tracker(addresses.__contains__) as tracker:
                    result = wrapped(*args, **kwargs)
                self.peak = tracker.peak
            else:
                start = time.perf_counter()
                result = wrapped(*args, **kwargs)
                if self._number > COUNTED_STEP:
                    self.seconds.append(time.perf_counter() - start)
            self.losses += [float(each).hex() for each in result[0].values()]
            return result

        return train_step


def _work(out: Path) -> int:
    import mindspeed_lite.megatron_adaptor  # noqa: F401
    from mindspeed_lite.bench.probes import train_step
    from mindspeed_lite.platform import allocator

    # One process meets itself, at whatever port is free.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    allocator.keep_freed_memory()
    steps = _Steps()
    train_step.around_steps("counting", "a benchmark counts", steps.around)
    script = ROOT / "examples" / "pretrain_gpt.py"
    sys.argv[0] = str(script)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
    found = {"peak": steps.peak, "seconds": steps.seconds, "losses": steps.losses}
    (out / f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
