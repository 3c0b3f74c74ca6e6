"""What giving up activations and norms costs in time: `python -m benchmarks.recompute`.

    python -m benchmarks.recompute [--pairs 20] [--page docs/benchmarks/recompute.md]

The training dense-medium with every dense feature on, in one process. Steps alternate between keeping the outputs of
activations and norms and computing them again (off on, on off, ...), so that what drifts drifts for both; between two
runs this machine's speed would differ by more than what is measured.
"""

from __future__ import annotations

import argparse
import os
import runpy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mindspeed_lite.megatron_adaptor  # noqa: F401
from benchmarks.configurations import CONFIGURATIONS, DENSE
from mindspeed_lite import platform
from mindspeed_lite.bench.probes import train_step
from mindspeed_lite.bench.statistics import paired_ratio
from mindspeed_lite.patches._shared.proxies import RECOMPUTED
from mindspeed_lite.platform import allocator

ROOT = Path(__file__).resolve().parent.parent
WARMUP = 3
SWITCHES = ("--recompute-activation-function", "--recompute-norm")


class Alternation:
    """Turns recomputation on and off from step to step, and keeps the times."""

    def __init__(self) -> None:
        self.seconds: dict[bool, list[float]] = {False: [], True: []}
        self._number = 0

    def around(self, wrapped: Callable[..., Any], session: Any) -> Callable[..., Any]:
        def train_step(*args: Any, **kwargs: Any) -> Any:
            self._number += 1
            counted = self._number - WARMUP - 1
            recomputes = counted % 4 in (1, 2)
            switched = _switch(args[2], recomputes)
            assert switched, "no layer of this model gives anything up"
            start = time.perf_counter()
            result = wrapped(*args, **kwargs)
            if counted >= 0:
                self.seconds[recomputes].append(time.perf_counter() - start)
                print(f"step {counted + 1}, {'on' if recomputes else 'off'}: {self.seconds[recomputes][-1]:.3f} s")
            return result

        return train_step


def _switch(chunks: Any, recomputes: bool) -> int:
    """Sets what the features' patches ask every layer for; returns how many places there are."""
    names = (RECOMPUTED, "recompute_input_layernorm", "recompute_pre_mlp_layernorm")
    places = [(part, name) for chunk in chunks for part in chunk.modules() for name in names if name in vars(part)]
    for part, name in places:
        setattr(part, name, recomputes)
    return len(places)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and write the page if one is named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recompute", description="What recomputation costs.")
    parser.add_argument("--pairs", type=int, default=20, metavar="N", help="pairs of steps (default %(default)s)")
    parser.add_argument("--page", metavar="FILE", help="the page to write")
    options = parser.parse_args(arguments)
    configuration = next(each for each in CONFIGURATIONS["cpu"] if each.name == "dense-medium")
    script, *flags = configuration.command()[1:]
    on = [f"--{name.replace('_', '-')}" for name in DENSE.split(",")]
    flags += [*on, *SWITCHES, "--exit-interval", str(WARMUP + 2 * options.pairs)]
    # One process meets itself, at whatever port is free.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    allocator.keep_freed_memory()
    alternation = Alternation()
    train_step.around_steps("alternation", "a benchmark alternates", alternation.around)
    sys.argv = [script, *flags]
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
    _tell(alternation, options.page)
    return 0


def _tell(alternation: Alternation, page: str | None) -> None:
    off, on = alternation.seconds[False], alternation.seconds[True]
    found = paired_ratio(on, off)
    assert found is not None
    times = {name: statistics.median(each) for name, each in (("off", off), ("on", on))}
    best = {name: min(each) for name, each in (("off", off), ("on", on))}
    lines = [
        "# Activations and norms computed again",
        "",
        f"`python -m benchmarks.recompute --pairs {len(off)}` on {platform.choose().describe()}:",
        "dense-medium (4 layers, hidden 1024, sequence 1024) with every dense feature on, steps of one process that",
        f"alternate between off and `{' '.join(SWITCHES)}`.",
        "",
        "| | off | on | on over off |",
        "| --- | ---: | ---: | ---: |",
        f"| median step | {times['off']:.3f} s | {times['on']:.3f} s | {times['on'] / times['off']:.3f} |",
        f"| fastest step | {best['off']:.3f} s | {best['on']:.3f} s | {best['on'] / best['off']:.3f} |",
        f"| mean of the pairs, 95 % interval | | | {found.words(3)} |",
        "",
        f"Ratios of the pairs: {', '.join(f'{each:.3f}' for each in found.pairs)}.",
    ]
    print("\n".join(lines))
    if page is not None:
        Path(page).parent.mkdir(parents=True, exist_ok=True)
        Path(page).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
