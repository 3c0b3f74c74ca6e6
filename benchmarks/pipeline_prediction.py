"""A pipeline schedule simulated and executed: bubble and memory, `python -m benchmarks.pipeline_prediction`.

    python -m benchmarks.pipeline_prediction [--orders 1f1b zb-h1 ...] [--layer 10] [--micro-batches 8] [--steps 3]
                                             [--page docs/benchmarks/pipeline.md]

Two processes train a model in each order. A layer sleeps `--layer` milliseconds in its forward pass, as long again for
the gradient of its input and for those of its weights, so that what else the machine does counts for little. The
schedule is simulated with the times of steps, of messages and between steps, and its idle time set beside that which
was recorded. Memory is what autograd has saved (activations), counted at its peak in each process, beside the peak that
the schedule and what one micro-batch keeps come to.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mindspeed_lite
from benchmarks import page
from lab.network import Delays
from lab.ranks import Rates, on_ranks
from mindspeed_lite.memory.saved_tensors import Tracker
from mindspeed_lite.pipeline import costs, draw, trace
from mindspeed_lite.pipeline.orders import PipelineShape
from mindspeed_lite.pipeline.simulate import simulate
from mindspeed_lite.pipeline.steps import Kind, Schedule

RANKS = 2
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
FUSED = {"use_gradient_accumulation_fusion": True}
# Order -> model chunks of a rank, flags, configuration.
ORDERS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "1f1b": (1, {"pipeline_schedule": "1f1b"}, {}),
    "interleaved": (2, {"pipeline_schedule": "interleaved"}, {}),
    "zb-h1": (1, {"pipeline_schedule": "zb-h1", **FUSED}, {}),
    "dualpipev": (2, {"schedules_method": "dualpipev", **FUSED}, {}),
    "interleaved+recompute-in-advance": (2, {"recompute_in_advance": True}, FULL),
    "interleaved+recompute-in-bubble": (2, {"recompute_in_bubble": True}, FULL),
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


class Counted:
    """Bytes that autograd holds after the passes of a rank, and at the peak.

    changes: (kind, chunk) -> by how much the first pass of it changed them.
    """

    def __init__(self, models: Sequence[Any]) -> None:
        own = {each.data_ptr() for model in models for each in model.module.parameters()}
        self.tracker = Tracker(lambda address: address in own)
        self.changes: dict[tuple[str, int], int] = {}

    def around(self, kind: Kind, chunk: int, function: Any) -> Any:
        @functools.wraps(function)
        def counted(*args: Any) -> Any:
            before = self.tracker.bytes()
            found = function(*args)
            self.changes.setdefault((kind.value, chunk), self.tracker.bytes() - before)
            return found

        return counted


@contextmanager
def slow_layers(training: Any, seconds: float, delays: bool) -> Iterator[None]:
    """Let layers sleep; weight gradients in their own step where the order has such steps."""
    from mindspeed_lite.patches._shared.pipeline_passes import DelayedWgrads

    layers = [
        each for model in training.models for each in model.modules() if type(each).__name__ == "TransformerLayer"
    ]

    def hook(layer: Any, inputs: Any, output: Any) -> Any:
        time.sleep(seconds)
        slow = _SlowBackward.apply(output[0], seconds * (1 if delays else 2))  # type: ignore[no-untyped-call]
        return (slow, *output[1:])

    own = DelayedWgrads.run

    def run(self: Any, is_last: bool) -> None:
        own(self, is_last)
        time.sleep(seconds * len(layers) / len(training.models))

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_hook(hook).remove)
        if delays:
            DelayedWgrads.run = run  # type: ignore[method-assign]
            stack.callback(setattr, DelayedWgrads, "run", own)
        yield


def planned_schedule(flags: dict[str, Any], ranks: int, chunks: int, microbatches: int) -> Schedule:
    """Return what the flags of `ORDERS` run."""
    from mindspeed_lite.patches._shared import pipeline_orders

    settings = {"pipeline_schedule_max_live": None, **flags}
    found: Schedule = pipeline_orders.schedule_of(settings, PipelineShape(ranks, microbatches, chunks), False)
    return found


def delays_weight_gradients(flags: dict[str, Any]) -> bool:
    """Return whether their order may have weight gradients as steps of their own."""
    from mindspeed_lite.patches._shared import pipeline_orders

    return bool(pipeline_orders.delays_weight_gradients(flags))


def _trained(options: argparse.Namespace, order: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    """The counts of this rank; traces are in the folder. Memory is counted in a training step of its own."""
    from megatron.core import parallel_state

    from mindspeed_lite.patches._shared.pipeline_passes import MegatronPasses
    from tests.harness import core_loop

    chunks, flags, configuration = ORDERS[order]
    delays = delays_weight_gradients(flags)
    with mindspeed_lite.enabled(**flags, pipeline_schedule_trace=str(folder), strict=True):
        training = core_loop.Training(
            {
                "pp": RANKS,
                "layers": 2 * RANKS,
                "micro_batches": options.micro_batches,
                "wgrad_fusion": delays,
                "config": configuration,
                **({"vpp": chunks} if chunks > 1 else {}),
            }
        )
        with slow_layers(training, options.layer / 1000, delays):
            for _ in range(options.steps + 1):
                training.zero()
                dist.barrier()
                training.forward_backward()
        training.zero()
        counted, names = Counted(training.models), {kind: kind.name.lower() for kind in Kind}
        with ExitStack() as stack:
            for kind, name in names.items():
                own = getattr(MegatronPasses, name)
                stack.callback(setattr, MegatronPasses, name, own)

                def bind(self: Any, chunk: int, own: Any = own, kind: Kind = kind) -> Any:
                    return counted.around(kind, chunk, own(self, chunk))

                setattr(MegatronPasses, name, bind)
            stack.enter_context(counted.tracker)
            training.forward_backward()
    parallel_state.destroy_model_parallel()
    return counted.changes, {"peak": counted.tracker.peak}


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


def _measure(options: argparse.Namespace, folder: Path, rates: Rates) -> list[dict[str, Any]]:
    rows = []
    for order in options.orders:
        chunks, flags, _ = ORDERS[order]
        traces = folder / order
        changes, found = _trained(options, order, traces)
        schedule = planned_schedule(flags, RANKS, chunks, options.micro_batches)
        mine = (_predicted_bytes(schedule, dist.get_rank(), changes), found["peak"])
        every: list[Any] = [None] * RANKS
        dist.all_gather_object(every, mine)
        rows.append({"order": order, "memory": every, **_bubbles(schedule, traces)})
    return rows


def _bubbles(schedule: Schedule, traces: Path) -> dict[str, float]:
    # The first step makes buffers, and the last one sleeps nowhere.
    steps = trace.training_steps(trace.read(traces), schedule)[1:-1]
    typical = sorted(steps, key=lambda each: each.bubble)[len(steps) // 2]
    overheads = trace.overheads([typical])
    return {
        # Each step as long as it was in this training step: nothing else, and what is besides steps in it.
        "as long": simulate(typical.schedule, trace.recorded_costs(typical)).bubble,
        "besides": simulate(typical.schedule, trace.recorded_costs(typical, overheads)).bubble,
        "simulated": simulate(typical.schedule, trace.median_costs(steps)).bubble,
        "recorded": typical.bubble,
        "message": overheads.message,
        "between": statistics.fmean(overheads.between.get(step.kind, 0.0) for step in typical.schedule.steps(0)),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the page with its figure."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline_prediction", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("--orders", nargs="+", default=[*ORDERS], choices=[*ORDERS])
    parser.add_argument("--layer", type=float, default=10.0, metavar="MS")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp())
    rows = on_ranks(RANKS, Delays(), functools.partial(_measure, options, folder))
    text = _page(options, rows, page.command("pipeline_prediction", arguments))
    page.write(options, text)
    if options.page is not None:
        order = "zb-h1" if "zb-h1" in options.orders else options.orders[0]
        chunks, flags, _ = ORDERS[order]
        schedule = planned_schedule(flags, RANKS, chunks, options.micro_batches)
        steps = trace.training_steps(trace.read(folder / order), schedule)[1:-1]
        title = f"{order}, simulated with the median times of its kinds of steps"
        simulated = simulate(steps[0].schedule, trace.median_costs(steps))
        draw.png({title: simulated, "executed": steps[-1]}, options.page.with_suffix(".png"), "s")
    return 0


def _page(options: argparse.Namespace, rows: Sequence[dict[str, Any]], command: str) -> str:
    lines = [
        "# Pipeline schedules: simulated and executed",
        "",
        f"`{command}`",
        "",
        f"{page.machine()} Two processes. {2 * RANKS} layers, {options.micro_batches} "
        f"micro-batches; a layer sleeps {options.layer:g} ms forward and twice as long backward. "
        f"Median of {options.steps} steps.",
        "",
        "| order | message, between steps | idle, steps alone | all its times | median steps | recorded | off by | "
        "peak bytes, simulated | counted | off by at most |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = row["besides"] / row["recorded"] - 1
        besides = f"{row['message'] * 1e3:.2f} ms, {row['between'] * 1e3:.2f} ms"
        memory = max(abs(simulated / counted - 1) for simulated, counted in row["memory"])
        numbers = [", ".join(f"{each[place] / 2**20:.2f} MiB" for each in row["memory"]) for place in (0, 1)]
        idle = (f"{row[name]:.1%}" for name in ("as long", "besides", "simulated", "recorded"))
        cells = (f"`{row['order']}`", besides, *idle, f"{ratio:+.1%}", *numbers, f"{memory:.1%}")
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "*message*: from the end of the sender's step to the begin of the receiver's; *between steps*: of rank 0; "
        "means. *idle*: share of both ranks' time without a step, simulated with each step's own time, with "
        "messages and the time between steps too (*all its times*, which *off by* is of), with median times, and "
        "recorded. *peak bytes*: what autograd saves on ranks 0 and 1, simulated from the first micro-batch of "
        "each chunk.",
        "",
        "![The schedule, simulated and executed](pipeline.png)",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
