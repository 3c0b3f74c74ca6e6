"""Training steps with `--grad-reduce-compression int8` against fp32 and Megatron's bf16 reduction, over slow links."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch.distributed as dist

import mindspeed_lite
from benchmarks.harness import RATIOS, Benchmark, Columns, Options, Row, rate, table
from lab.ranks import Measure, Rates, compare, on_ranks, timed, use_device_layer
from mindspeed_lite.bench.wording import seconds
from mindspeed_lite.planner import devices, gradients, read
from mindspeed_lite.planner.published import PublishedDevice
from mindspeed_lite.planner.work import Group
from tests.harness import core_loop

OPTIMIZERS = {"all-reduce": False, "distributed": True}


def _trainings(options: Options, scatters: bool) -> dict[str, core_loop.Training]:
    """One for each arm; what is built before the feature is on stays as it is, which strict mode would not allow."""
    given: dict[str, Any] = {
        "layers": options.layers,
        "micro_batches": 1,
        "distributed_optimizer": scatters,
        "config": {"hidden_size": options.hidden, "ffn_hidden_size": 4 * options.hidden},
    }
    made = {"fp32": core_loop.Training(given), "bf16": core_loop.Training({**given, "grad_reduce_in_fp32": False})}
    report = mindspeed_lite.enable(grad_reduce_compression="int8")
    if not any(each.status == "applied" for each in report.entries):
        raise SystemExit(report.to_text())
    return {**made, "int8": core_loop.Training(given)}


def _measure(options: Options, rates: Rates) -> list[Row]:
    use_device_layer()
    rows = []
    for name, scatters in OPTIMIZERS.items():
        trainings = _trainings(options, scatters)

        def step(arm: str, trainings: dict[str, core_loop.Training] = trainings) -> Measure:
            return Measure(timed(trainings[arm].step))

        parameters = sum(each.numel() for each in trainings["fp32"].models[0].parameters())
        for megabits in (*options.rates, 0):
            rates.set(megabits or None)
            found = {arm: compare((arm, "int8"), options.repeats, step) for arm in ("fp32", "bf16")}
            rows.append(
                {
                    "ranks": dist.get_world_size(),
                    "optimizer": name,
                    "rate": megabits or None,
                    "parameters": parameters,
                    **{arm: each["seconds"][arm] for arm, each in found.items()},
                    "int8": found["fp32"]["seconds"]["int8"],
                    **{f"{arm} / int8": each["ratio"] for arm, each in found.items()},
                }
            )
        rates.set(None)
        mindspeed_lite.disable()
    return rows


def measure(options: Options) -> list[Row]:
    return [row for ranks in options.ranks for row in on_ranks(ranks, lambda rates: _measure(options, rates))]


_TRAINING = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 1 --seq-length 64 --micro-batch-size 1 "
    "--global-batch-size 128 --vocab-size 256 --bf16 --use-distributed-optimizer"
)
_INT8 = "--grad-reduce-compression int8 --grad-reduce-compression-scope"
ARMS = {"fp32": "", "bf16": "--grad-reduce-in-bf16", "int8": f"{_INT8} auto", "int8, scope all": f"{_INT8} all"}


def _predicted(arm: str, gigabits: float) -> float:
    """Seconds in which 16 nodes of 8 H100 reduce and scatter gradients of 1 billion parameters."""
    name, figures = devices.named("h100")
    device = PublishedDevice(name, dataclasses.replace(figures, network=gigabits * 1e9 / 8 / figures.node))
    training = read(f"{_TRAINING} {ARMS[arm]}".split(), 128)
    reduction = gradients.compressed_reduction if "int8" in arm else gradients.exact_reduction
    return reduction(training, 1e9, Group(128), device)


PREDICTED: Columns = {
    "Gbit/s of a node": lambda row: f"{row['gigabits']}",
    **{arm: lambda row, arm=arm: seconds(_predicted(arm, row["gigabits"])) for arm in ARMS},  # type: ignore[misc]
}
NOTE = f"""{RATIOS} bf16: Megatron's --grad-reduce-in-bf16. The distributed optimizer's gather of bf16 parameters, 2
bytes each, is not compressed: at most 6 / 3.06 = 1.96 times fp32's speed, and 1.31 times bf16's.

## When it pays

As `mindspeed-lite plan` prices it: the reduce-scatter of 1 billion parameters over 16 nodes of 8 H100, without overlap.

""" + "\n".join(table(PREDICTED, [{"gigabits": each} for each in (1, 10, 25, 100, 400, 3200)]))

BENCHMARK = Benchmark(
    name="grad_compression",
    title="Gradients in 8 bits over slow links",
    about="Steps of a GPT with {layers} layers and hidden size {hidden}, data-parallel, without overlap; each rank "
    "shares the cores and has a link of its own.",
    columns={
        "Ranks": lambda row: str(row["ranks"]),
        "Optimizer": lambda row: row["optimizer"],
        "Parameters": lambda row: f"{row['parameters'] / 1e6:.1f} M",
        "Link": lambda row: rate(row["rate"]),
        **{arm: lambda row, arm=arm: seconds(row[arm]) for arm in ("fp32", "bf16", "int8")},  # type: ignore[misc]
        **{arm: lambda row, arm=arm: row[arm] for arm in ("fp32 / int8", "bf16 / int8")},  # type: ignore[misc]
    },
    measure=measure,
    options={"ranks": [2, 4], "rates": [100, 500], "layers": 2, "hidden": 384, "repeats": 6},
    tiny={"ranks": [2], "rates": [100], "layers": 1, "hidden": 64, "repeats": 2},
    note=NOTE,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
