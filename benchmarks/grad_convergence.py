"""Losses of trainings on text with gradients in fp32, bf16, and int8 with and without error feedback.

One arm rounds its first weights the other way: what a training without compression differs by from itself.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import mindspeed_lite
from benchmarks.harness import ROOT, Benchmark, Options, Row
from lab.ranks import Rates, on_ranks, use_device_layer
from mindspeed_lite.parallel.compressed_reduce import CompressedReduce
from tests.harness import core_loop

RANKS = 2
# Learning rate: warm-up, then linear to 0.
PEAK, WARMUP = 2e-3, 50
NUDGED = "fp32, weights a rounding away"
EVALUATED, EVALUATION_SEED = 200, 99


def _without_feedback(start: Any) -> Any:
    def forgetful(self: CompressedReduce, *args: Any) -> Any:
        for residual in self.residuals:
            residual.zero_()
        return start(self, *args)

    return forgetful


def _text() -> bytes:
    return b"".join(path.read_bytes() for path in sorted((ROOT / "docs").rglob("*.md")))


def _losses(options: Options, arm: str, seed: int, folder: str) -> list[float]:
    text = {"text": f"{folder}/text", "micro_batches": 1}
    given = {**text, "seed": seed, "grad_reduce_in_fp32": arm != "bf16", "nudge": int(arm == NUDGED)}
    training = core_loop.Training(given)
    for step in range(options.steps):
        for group in training.optimizer.param_groups:
            group["lr"] = PEAK * min(1.0, (step + 1) / WARMUP) * (1 - step / options.steps)
        training.step()
    training.iterators = core_loop.Training({**text, "seed": EVALUATION_SEED}).iterators
    return [float.fromhex(loss) for _ in range(EVALUATED) for _, loss in training.evaluate()]


def _measure(options: Options, rates: Rates) -> list[Row]:
    use_device_layer()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "text").write_bytes(_text())
        for seed in options.seeds:
            for arm in options.arms:
                start = CompressedReduce.start
                is_forgetful = arm == "int8, no feedback"
                with (
                    mock.patch.object(CompressedReduce, "start", _without_feedback(start) if is_forgetful else start),
                    mindspeed_lite.enabled(grad_reduce_compression="int8" if "int8" in arm else None),
                ):
                    loss = torch.tensor(fmean(_losses(options, arm, seed, folder)), dtype=torch.float64)
                dist.all_reduce(loss)
                rows.append({"arm": arm, "seed": seed, "loss": float(loss) / RANKS})
    return rows


BENCHMARK = Benchmark(
    name="grad_convergence",
    title="Losses with gradients in 8 bits",
    about="A GPT with 2 layers and hidden size 64 learns bytes of this documentation on "
    f"{RANKS} data-parallel ranks in {{steps}} steps. The loss is that of {EVALUATED} batches with the same draw for "
    "all; a seed draws weights and the order of the text.",
    columns={
        "Gradients": lambda row: row["arm"],
        "Seed": lambda row: str(row["seed"]),
        "Loss": lambda row: f"{row['loss']:.4f}",
    },
    measure=lambda options: on_ranks(RANKS, lambda rates: _measure(options, rates)),
    options={"steps": 2000, "seeds": [1, 2], "arms": ["fp32", NUDGED, "int8"]},
    note="The same training with its first weights moved by one rounding ends as far away: differences between these "
    "losses are chance, with and without compression.",
    tiny={"steps": 2, "seeds": [1], "arms": ["int8, no feedback"]},
    choices={"arms": ["fp32", NUDGED, "bf16", "int8", "int8, no feedback"]},
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
