"""Speed after features were switched off and on again, as reinforcement learning does between generation and training.

Each arm is a fresh process: features never on, on throughout, or on for each step and off for the generation after it.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from statistics import median
from typing import Any

import mindspeed_lite
from benchmarks.harness import Benchmark, Options, Row, ms
from lab.ranks import Loopback, Rates, on_ranks
from mindspeed_lite.bench.statistics import paired_ratio
from tests.harness import core_loop, switching
from tests.harness.feature_layouts import host_args

NEVER, STEADY, SWITCHED = "never on", "steady", "switched"


def _seconds(function: Any, *args: Any) -> float:
    before = time.perf_counter()
    function(*args)
    return time.perf_counter() - before


def _medians(arm: str, options: Options, rates: Rates) -> dict[str, float]:
    """Seconds of a step, of a generation, of switching on and of switching off, in this process."""
    core_loop.SEQUENCE = options.sequence
    found: dict[str, list[float]] = {"training step": [], "generation": [], "switch on": [], "switch off": []}
    flags = {} if arm == NEVER else {"host_args": host_args("plain"), **switching.FLAGS}
    mindspeed_lite.enable(**flags)
    width = {"hidden_size": options.hidden, "ffn_hidden_size": 3 * options.hidden}
    training = core_loop.Training({"layers": options.layers, "micro_batches": 2, "config": width})
    for _ in range(options.cycles + 1):
        found["training step"].append(_seconds(training.step))
        if arm == SWITCHED:
            found["switch off"].append(_seconds(mindspeed_lite.disable))
            mindspeed_lite.enable()
        if arm != STEADY:
            found["generation"].append(_seconds(switching.generate, training.models[0]))
        if arm == SWITCHED:
            mindspeed_lite.disable()
            found["switch on"].append(_seconds(lambda: mindspeed_lite.enable(**flags)))
    # The first of each builds kernels and plans.
    return {name: median(each[1:]) for name, each in found.items() if each}


def _measure(options: Options) -> list[Row]:
    found: dict[str, list[dict[str, float]]] = {NEVER: [], STEADY: [], SWITCHED: []}
    for _ in range(options.repeats):
        for arm, runs in found.items():
            runs.append(on_ranks(1, Loopback(), partial(_medians, arm, options)))

    def row(what: str, reference: str | None) -> Row:
        after, before = ([run[what] for run in found[arm]] if arm else [] for arm in (SWITCHED, reference))
        return {"what": what, "before": before, "after": after, "ratio": paired_ratio(after, before)}

    references = {"training step": STEADY, "generation": NEVER, "switch on": None, "switch off": None}
    return [row(*each) for each in references.items()]


BENCHMARK = Benchmark(
    name="switching",
    title="Speed after a switch",
    about="One process with one thread, a dense model of {layers} layers of {hidden}, bf16, and the features that "
    "`tests/harness/switching.py` lists. Medians of {cycles} in a process, {repeats} processes of each kind in turn; "
    "the ratio with its 95 % interval.",
    columns={
        "": lambda row: row["what"],
        "never switched": lambda row: ms(median(row["before"])) if row["before"] else "",
        "after switches": lambda row: ms(median(row["after"])),
        "ratio": lambda row: row["ratio"].words() if row["ratio"] else "",
    },
    measure=_measure,
    options={"cycles": 8, "repeats": 6, "layers": 4, "hidden": 256, "sequence": 256},
    tiny={"cycles": 1, "repeats": 1, "layers": 2, "hidden": 64, "sequence": 32},
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
