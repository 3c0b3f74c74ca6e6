"""Counts the micro-batches a pipeline stage keeps at once, by simulating its forward and backward passes.

Without pipelining one after the other. With it 1F1B: a stage runs as many forward passes ahead as there are stages
behind it, then one backward for each forward pass. Interleaved, with model chunks in turns, more of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_lite.pipeline import orders
from mindspeed_lite.pipeline.orders import PipelineShape
from mindspeed_lite.pipeline.steps import Kind, Step

from .training import TrainingConfig

Pass = tuple[str, int]  # ("forward" or "backward", model chunk)


def passes(training: TrainingConfig, stage: int) -> Iterator[Pass]:
    """The passes of one training step on a stage, in Megatron's order."""
    chunks, count = (training.vpp if training.pp > 1 else 1), training.microbatches
    group = min(training.microbatch_group_size_per_vp_stage or training.pp, count)
    # Later micro-batches repeat what these do.
    count = min(count, 4 * max(training.pp, group)) if count % group == 0 else count
    order = orders.interleaved if chunks > 1 else orders.one_forward_one_backward
    for step in order(stage, PipelineShape(training.pp, count, chunks, group)):
        assert isinstance(step, Step)
        yield ("forward" if step.kind is Kind.FORWARD else "backward"), step.chunk


def before_backward(training: TrainingConfig, stage: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """At the start of each backward pass: its chunk, and how many micro-batches each chunk keeps, this one included."""
    kept = [0] * (training.vpp if training.pp > 1 else 1)
    for kind, chunk in passes(training, stage):
        if kind == "forward":
            kept[chunk] += 1
        else:
            yield chunk, tuple(kept)
            kept[chunk] -= 1
