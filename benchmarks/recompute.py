"""Memory of activations and step time: features off, recomputation of Megatron's, ours, and `--adaptive-memory`.

Each arm trains in processes of its own, in turn. Activations are what autograd saves at the peak of the last step on
the fullest rank, from a training that is not timed. Budgets are what other arms take, or shares of what off takes.
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.configurations import CONFIGURATIONS, DENSE
from benchmarks.harness import Benchmark, Options, Row, launcher, train
from lab.ranks import ratio_in_words
from mindspeed_lite.bench.harness import Outcome
from mindspeed_lite.bench.wording import seconds, size

OFF = "off"
ARMS = {
    OFF: "",
    "activation function and norms": "--recompute-activation-function --recompute-norm",
    "Megatron's full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "Megatron's selective": "--recompute-granularity selective",
}
MOE = "moe_grouped_gemm,moe_permute_fusion,moe_router_fusion"
NAMES = ("dense-medium", "long", "moe-small")
# Before the measured ones: `--adaptive-memory` records two and measures three at most.
WARMUP = 5


def _command(name: str, flags: str, vocabulary: int) -> list[str]:
    """The training with its features on, a smaller vocabulary and one micro-batch on each rank.

    With a larger vocabulary the output layer, which no arm changes, takes most of a step.
    """
    group = "tiny" if name == "tiny" else "cpu"
    found = next(each for each in CONFIGURATIONS[group] if each.name == (name if group == "cpu" else "dense"))
    features = f"{DENSE},{MOE}" if "moe" in name else DENSE
    on = [f"--{each.replace('_', '-')}" for each in features.split(",")]
    text = " ".join(found.command())
    for flag, value in {"--vocab-size": vocabulary - 1, "--global-batch-size": found.processes}.items():
        text = re.sub(rf"{flag} \d+", f"{flag} {value}", text)
    words = text.split()
    return [*launcher(found.processes), *words[words.index("examples/pretrain_gpt.py") :], *on, *flags.split()]


def _within(budget: float) -> str:
    return f"--adaptive-memory --memory-budget {budget / 2**30:.6f}"


def _activations(outcome: Outcome) -> int:
    return max(int(each.end["memory"]["activations"]) for each in outcome.processes if each.end is not None)


def _measure(options: Options) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="recompute-") as folder:

        def run(flags: str, memory: bool) -> Outcome:
            command = _command(options.configuration, flags, options.vocabulary)
            return train(command, Path(folder), options.steps, WARMUP, memory)

        fixed = {arm: flags for arm, flags in ARMS.items() if arm in (OFF, *options.arms)}
        peaks = {arm: _activations(run(flags, True)) for arm, flags in fixed.items()}
        budgets = {f"chosen within that of {arm}": peaks[arm] for arm in fixed if arm.startswith("Megatron's")}
        budgets |= {f"chosen within {share:.0%}": int(share * peaks[OFF]) for share in options.shares}
        arms = {**fixed, **{arm: _within(budget) for arm, budget in budgets.items()}}
        peaks |= {arm: _activations(run(arms[arm], True)) for arm in budgets}
        runs: dict[str, list[Outcome]] = {arm: [] for arm in arms}
        for repeat in range(options.repeats):
            for arm in arms if repeat % 2 == 0 else reversed(arms):
                runs[arm].append(run(arms[arm], False))
    times = {arm: [statistics.median(each.measured_seconds) for each in its] for arm, its in runs.items()}
    losses = {arm: [step["loss"] for step in its[0].steps] for arm, its in runs.items()}
    return [
        {
            "arm": arm, "peak": peaks[arm], "share": peaks[arm] / peaks[OFF], "budget": budgets.get(arm),
            "seconds": statistics.median(times[arm]), "ratio": ratio_in_words(times[arm], times[OFF]),
            "bits": losses[arm] == losses[OFF],
        }
        for arm in arms
    ]  # fmt: skip


BENCHMARK = Benchmark(
    name="recompute",
    title="Memory of activations and time",
    about="The training {configuration} of [`make bench`](cpu.md) with all its features, a vocabulary of {vocabulary} "
    "and one micro-batch on each rank. Medians of {steps} steps, {repeats} processes of each arm in turn; ratios with "
    "their 95 % interval.",
    columns={
        "arm": lambda row: row["arm"],
        "budget": lambda row: size(row["budget"]) if row["budget"] else "",
        "activations": lambda row: size(row["peak"]),
        "of off": lambda row: f"{row['share']:.1%}",
        "step": lambda row: seconds(row["seconds"]),
        "over off": lambda row: row["ratio"],
        "losses": lambda row: "the same bits" if row["bits"] else "DIFFER",
    },
    measure=_measure,
    options={"configuration": NAMES[0], "arms": [*ARMS], "vocabulary": 4096, "repeats": 4, "steps": 6,
             "shares": [0.3, 0.5, 0.7]},
    tiny={"configuration": "tiny", "arms": [OFF], "vocabulary": 128, "repeats": 1, "steps": 2, "shares": [0.7]},
    choices={"configuration": [*NAMES, "tiny"], "arms": [*ARMS]},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
