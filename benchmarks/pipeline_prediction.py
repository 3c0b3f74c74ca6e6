"""Pipeline schedules simulated and executed: idle time, and peak memory of activations.

Two processes train a model in each order. A layer sleeps in its forward pass, as long again for the gradient of its
input and for those of its weights. The simulation has the median times of steps and the mean time of messages of the
recorded training step; peak memory follows from what the first micro-batch of each chunk keeps.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import mindspeed_lite
from benchmarks.harness import Benchmark, Options, Row
from lab.ranks import Rates, on_ranks
from mindspeed_lite.bench.wording import size
from mindspeed_lite.memory.saved_tensors import Tracker
from mindspeed_lite.pipeline import costs, draw, trace
from mindspeed_lite.pipeline.orders import PipelineShape
from mindspeed_lite.pipeline.simulate import simulate
from mindspeed_lite.pipeline.steps import Kind, Schedule

RANKS = 2
_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_FUSED = {"use_gradient_accumulation_fusion": True}
# Order -> model chunks of a rank, flags, configuration.
ORDERS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "1f1b": (1, {"pipeline_schedule": "1f1b"}, {}),
    "interleaved": (2, {"pipeline_schedule": "interleaved"}, {}),
    "zb-h1": (1, {"pipeline_schedule": "zb-h1", **_FUSED}, {}),
    "dualpipev": (2, {"schedules_method": "dualpipev", **_FUSED}, {}),
    "interleaved+recompute-in-advance": (2, {"recompute_in_advance": True}, _FULL),
    "interleaved+recompute-in-bubble": (2, {"recompute_in_bubble": True}, _FULL),
}


class _SlowBackward(torch.autograd.Function):
    """Identity whose backward pass sleeps."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return grad, None


@contextmanager
def _slow_layers(training: Any, seconds: float, delays: bool) -> Iterator[None]:
    """Let layers sleep; weight gradients in their own step where the order has such steps."""
    from mindspeed_lite.patches._shared.pipeline_passes import DelayedWgrads

    modules = [each for model in training.models for each in model.modules()]
    layers = [each for each in modules if type(each).__name__ == "TransformerLayer"]
    own = DelayedWgrads.run

    def hook(layer: Any, inputs: Any, output: Any) -> Any:
        time.sleep(seconds)
        slow = _SlowBackward.apply(output[0], seconds * (1 if delays else 2))  # type: ignore[no-untyped-call]
        return (slow, *output[1:])

    def run(self: Any, is_last: bool) -> None:
        own(self, is_last)
        time.sleep(seconds * len(layers) / len(training.models))

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_hook(hook).remove)
        if delays:
            stack.enter_context(mock.patch.object(DelayedWgrads, "run", run))
        yield


@contextmanager
def _counted(training: Any) -> Iterator[tuple[Tracker, dict[tuple[str, int], int]]]:
    """Bytes that autograd holds, and by how much the first pass of each (kind, chunk) changes them."""
    from mindspeed_lite.patches._shared.pipeline_passes import MegatronPasses

    weights = {each.untyped_storage()._cdata for model in training.models for each in model.module.parameters()}
    tracker, changes = Tracker(weights.__contains__), dict[tuple[str, int], int]()

    def counting(kind: Kind, own: Any) -> Any:
        def bind(self: Any, chunk: int) -> Any:
            function = own(self, chunk)

            @functools.wraps(function)
            def run(*args: Any) -> Any:
                before = tracker.bytes()
                result = function(*args)
                changes.setdefault((kind.value, chunk), tracker.bytes() - before)
                return result

            return run

        return bind

    with ExitStack() as stack:
        for kind in Kind:
            name = kind.name.lower()
            bound = counting(kind, getattr(MegatronPasses, name))
            stack.enter_context(mock.patch.object(MegatronPasses, name, bound))
        stack.enter_context(tracker)
        yield tracker, changes


def _schedule(order: str, micro_batches: int) -> Schedule:
    from mindspeed_lite.patches._shared import pipeline_orders

    chunks, flags, _ = ORDERS[order]
    shape = PipelineShape(RANKS, micro_batches, chunks)
    found: Schedule = pipeline_orders.schedule_of({"pipeline_schedule_max_live": None, **flags}, shape, False)
    return found


def _train(options: Options, order: str, folder: Path) -> tuple[dict[tuple[str, int], int], int]:
    """Write traces into the folder; returns the counts of this rank and its peak, from a step of their own."""
    from megatron.core import parallel_state

    from mindspeed_lite.patches._shared import pipeline_orders
    from tests.harness import core_loop

    chunks, flags, configuration = ORDERS[order]
    delays = bool(pipeline_orders.delays_weight_gradients(flags))
    given = {"pp": RANKS, "layers": 2 * RANKS, "micro_batches": options.micro_batches, "wgrad_fusion": delays,
             "config": configuration, **({"vpp": chunks} if chunks > 1 else {})}  # fmt: skip
    with mindspeed_lite.enabled(**flags, pipeline_schedule_trace=str(folder), strict=True):
        training = core_loop.Training(given)
        with _slow_layers(training, options.layer / 1000, delays):
            for _ in range(options.steps + 1):
                training.zero()
                dist.barrier()
                training.forward_backward()
        training.zero()
        with _counted(training) as (tracker, changes):
            training.forward_backward()
    parallel_state.destroy_model_parallel()
    return changes, tracker.peak


def _predicted_bytes(schedule: Schedule, rank: int, changes: dict[tuple[str, int], int]) -> float:
    """The peak of a rank from what one micro-batch of each chunk keeps."""
    stages, row = schedule.num_stages, schedule.placement[rank]
    activations, inputs = [0.0] * stages, [0.0] * stages
    recomputed = {(step.chunk) for step in schedule.steps(rank) if step.kind is Kind.RECOMPUTE}
    first = {step.chunk: step.microbatch for step in reversed([*schedule.steps(rank)]) if step.kind is Kind.FORWARD}
    for chunk, stage in enumerate(row):
        kept = changes["F", chunk]
        activations[stage] = inputs[stage] = kept
        if chunk in recomputed and (stage, first[chunk]) in schedule.recomputed:
            activations[stage] = kept + changes["R", chunk]
        elif chunk in recomputed:
            inputs[stage] = kept - changes["R", chunk]
    unit = replace(costs.uniform(stages), activation_bytes=activations, input_bytes=inputs)
    return costs.peak_bytes(schedule, rank, unit)


def _rows(options: Options, folder: Path, rates: Rates) -> list[Row]:
    rows = []
    for order in options.orders:
        changes, peak = _train(options, order, folder / order)
        schedule = _schedule(order, options.micro_batches)
        peaks: list[Any] = [None] * RANKS
        dist.all_gather_object(peaks, (_predicted_bytes(schedule, dist.get_rank(), changes), peak))
        # The first step makes buffers, and the last one sleeps nowhere.
        steps = trace.training_steps(trace.read(folder / order), schedule)[1:-1]
        typical = sorted(steps, key=lambda each: each.bubble)[len(steps) // 2]
        recorded = trace.median_costs([typical])
        rows.append({
            "order": order, "peaks": peaks, "recorded": typical.bubble,
            "simulated": simulate(typical.schedule, recorded).bubble,
        })  # fmt: skip
    return rows


def _measure(options: Options) -> list[Row]:
    options.folder = Path(tempfile.mkdtemp())
    found: list[Row] = on_ranks(RANKS, functools.partial(_rows, options, options.folder))
    return found


def _picture(page: Path, options: Options, rows: list[Row]) -> None:
    order = options.orders[-1]
    schedule = _schedule(order, options.micro_batches)
    last = trace.training_steps(trace.read(options.folder / order), schedule)[-2]
    simulated = simulate(last.schedule, trace.median_costs([last]))
    draw.png({f"{order}, simulated": simulated, "executed": last}, page.with_suffix(".png"), "s")


BENCHMARK = Benchmark(
    name="pipeline_prediction",
    title="Pipeline schedules: simulated and executed",
    about="Two processes, 4 layers, {micro_batches} micro-batches; a layer sleeps {layer:g} ms forward and twice as "
    "long backward. Of {steps} steps the median one.",
    columns={
        "order": lambda row: f"`{row['order']}`",
        "idle, simulated": lambda row: f"{row['simulated']:.1%}",
        "recorded": lambda row: f"{row['recorded']:.1%}",
        "off by": lambda row: f"{row['simulated'] / row['recorded'] - 1:+.1%}",
        "peak bytes, simulated": lambda row: ", ".join(size(peak) for peak, _ in row["peaks"]),
        "counted": lambda row: ", ".join(size(peak) for _, peak in row["peaks"]),
    },
    measure=_measure,
    options={"orders": [*ORDERS], "layer": 10.0, "micro_batches": 8, "steps": 3},
    tiny={"orders": ["1f1b", "zb-h1"], "micro_batches": 4, "steps": 1},
    choices={"orders": [*ORDERS]},
    note="*idle*: share of both ranks' time without a step. *peak bytes*: what autograd saves on ranks 0 and 1.\n\n"
    "![The schedule, simulated and executed](pipeline.png)",
    finish=_picture,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
