"""Predicts pipeline step costs: bytes from saved tensors, seconds from operations.

Without measurements, 1 is the forward pass of a micro-batch on an average rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mindspeed_lite.pipeline.costs import Costs
from mindspeed_lite.pipeline.steps import Placement

from . import estimate, layer_work, optimizer
from .layers import Chunk, stages
from .training import ArgumentError, TrainingConfig


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a micro-batch on an average rank, all chunks, and of a message."""

    forward: float
    input_grad: float
    weight_grad: float
    message: float = 0.0


class Flops(NamedTuple):
    """FLOPs of one micro-batch on one rank."""

    forward: float
    input_grad: float
    weight_grad: float


def model_stages(training: TrainingConfig, chunks: int) -> list[Chunk]:
    """Model chunks in order, `chunks` per rank. Raises ArgumentError if layers do not divide."""
    if training.pipeline_model_parallel_layout and chunks != training.vpp:
        raise ArgumentError(
            f"--pipeline-model-parallel-layout gives each rank {training.vpp} model chunks, not {chunks}"
        )
    if chunks != training.vpp or training.pp == 1:
        training = training.replace(num_virtual_stages_per_pipeline_rank=chunks)
    held = stages(training)
    return [held[stage % training.pp][stage // training.pp] for stage in range(training.pp * chunks)]


def costs(
    training: TrainingConfig, chunks: int, seconds: StepSeconds | None = None, recompute_steps: bool = False
) -> Costs:
    """Costs of every stage; recompute_steps: recomputations are schedule steps that restore a whole chunk."""
    held = model_stages(training, chunks)
    work = [flops(training, chunk) for chunk in held]
    unit = sum(each.forward for each in work) / training.pp
    scale = seconds or StepSeconds(
        1.0,
        sum(each.input_grad for each in work) / training.pp / unit,
        sum(each.weight_grad for each in work) / training.pp / unit,
    )
    is_full = training.recompute_granularity == "full"
    stored = training.replace(recompute_granularity="") if recompute_steps else training
    again = (
        training
        if is_full
        else training.replace(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    )
    kept, worst = zip(
        *(estimate.sizes(stored, each, stage // training.pp) for stage, each in enumerate(held)), strict=True
    )
    inputs = [estimate.sizes(again, each, stage // training.pp)[0] for stage, each in enumerate(held)]
    found = Costs(
        forward=_scaled([each.forward for each in work], scale.forward * training.pp),
        input_grad=_scaled([each.input_grad for each in work], scale.input_grad * training.pp),
        weight_grad=_scaled([each.weight_grad for each in work], scale.weight_grad * training.pp),
        message=scale.message,
        recomputes=is_full,
        activation_bytes=kept,
        input_bytes=inputs,
        backward_bytes=[most - least for most, least in zip(worst, kept, strict=True)],
    )
    if not (recompute_steps and is_full):
        return found
    # The last stage has none: it keeps inputs and restores layers one by one.
    last, (least, most) = len(held) - 1, estimate.sizes(training, held[-1], chunks - 1)
    return replace(
        found,
        activation_bytes=[*kept[:last], least],
        backward_bytes=[*list(found.backward_bytes)[:last], most - least],
    )


def constant_bytes(training: TrainingConfig, placement: Placement) -> list[int]:
    """Bytes of weights, gradients, optimizer, masks."""
    held = model_stages(training, len(placement[0]))
    found = []
    for rank, row in enumerate(placement):
        chunks = [held[stage] for stage in row]
        states = optimizer.states(training, estimate.parameters_of(training, chunks), rank)
        shared = sum(estimate.kept_once(training, chunk) for chunk in chunks)
        found.append(states.weights + states.gradients + states.optimizer + shared)
    return found


def flops(training: TrainingConfig, chunk: Chunk) -> Flops:
    """FLOPs of a chunk for one micro-batch on one rank; attention's backward takes twice its forward."""
    parts = [layer_work.layer(training, training.is_moe(number), number) for number in chunk.layers]
    parts += [layer_work.further(training)] * chunk.further
    parts += [layer_work.output(training)] if chunk.computes_loss else []
    linear = sum(each.flops for part in parts for each in part.products)
    scores = sum(each.flops for part in parts for each in part.scores)
    return Flops(linear + scores, linear + 2 * scores, linear)


def _scaled(work: Sequence[float], total: float) -> list[float]:
    whole = sum(work)
    return [total * each / whole for each in work]
