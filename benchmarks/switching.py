"""Speed after features were switched off and on again: `python -m benchmarks.switching`.

    python -m benchmarks.switching [--cycles 8] [--repeats 6] [--page docs/benchmarks/switching.md]

A process trains with features on throughout, or has them on for each step and off for the generation after it, as
reinforcement learning does; A B A B, each a fresh process. Generation is compared with that of a process which never
had a feature.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import mindspeed_lite
from benchmarks import page
from lab.ranks import Loopback, Rates, on_ranks
from mindspeed_lite.bench.statistics import paired_ratio
from tests.harness import core_loop, live_undo, switching

ARMS = ("never on", "steady", "switched")
_MODEL: dict[str, Any] = {
    "layers": 4,
    "micro_batches": 2,
    "config": {"hidden_size": 256, "ffn_hidden_size": 768, "num_attention_heads": 4, "num_query_groups": 4},
}


def _seconds(function: Any, *args: Any) -> float:
    before = time.perf_counter()
    function(*args)
    return time.perf_counter() - before


def _medians(arm: str, cycles: int, rates: Rates) -> dict[str, float]:
    """Seconds of a step, of a generation, of switching on and of switching off, in this process."""
    core_loop.SEQUENCE = 256
    found: dict[str, list[float]] = {"step": [], "generation": [], "on": [], "off": []}
    flags = {} if arm == "never on" else {"host_args": live_undo.host_args("plain"), **switching.FLAGS}
    mindspeed_lite.enable(**flags)
    training = core_loop.Training(_MODEL)
    for _ in range(cycles + 1):
        found["step"].append(_seconds(training.step))
        if arm == "switched":
            found["off"].append(_seconds(mindspeed_lite.disable))
            mindspeed_lite.enable()
        if arm != "steady":
            found["generation"].append(_seconds(switching.generate, training.models[0]))
        if arm == "switched":
            mindspeed_lite.disable()
            found["on"].append(_seconds(lambda: mindspeed_lite.enable(**flags)))
    # The first of each builds kernels and plans.
    return {name: median(each[1:]) for name, each in found.items() if each}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.switching", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--cycles", type=int, default=8, help="steps and generations of a process (%(default)s)")
    parser.add_argument("--repeats", type=int, default=6, help="processes of each kind (%(default)s)")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args(arguments)

    told: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for _ in range(options.repeats):
        for arm in ARMS:
            told[arm].append(on_ranks(1, Loopback(), partial(_medians, arm, options.cycles)))
    page.write(options, _page(options, told, page.command("switching", arguments)))
    return 0


def _page(options: argparse.Namespace, told: dict[str, list[dict[str, float]]], command: str) -> str:
    lines = [
        "# Speed after a switch",
        "",
        f"`{command}`",
        "",
        page.machine(),
        "",
        f"One process with one thread, a dense model of 4 layers of 256, bf16, {len(switching.FLAGS) - 1} features. "
        f"Medians of {options.cycles} in a process; {options.repeats} processes of each kind, taken in turn; the ratio "
        "with its 95 % interval.",
        "",
        "| | never switched | after switches | ratio |",
        "|---|---|---|---|",
    ]
    for title, what, reference in (("training step", "step", "steady"), ("generation", "generation", "never on")):
        seconds = [[each[what] for each in told[arm]] for arm in (reference, "switched")]
        ratio = paired_ratio(seconds[1], seconds[0])
        assert ratio is not None
        cells = [*(f"{1e3 * median(each):.1f} ms" for each in seconds), ratio.words()]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    on, off = (1e3 * median(each[what] for each in told["switched"]) for what in ("on", "off"))
    lines += ["", f"Switching on takes {on:.0f} ms and off {off:.0f} ms, with model and optimizer alive.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
