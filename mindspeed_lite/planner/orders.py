"""Pipeline schedule and chunk placement of a training."""

from __future__ import annotations

import functools

from mindspeed_lite.pipeline import orders as published
from mindspeed_lite.pipeline import steps
from mindspeed_lite.pipeline.orders import OrderError, PipelineShape
from mindspeed_lite.pipeline.steps import Placement, Schedule

from .layers import Chunk, stages
from .training import ArgumentError, TrainingConfig, cached_by

# Megatron's own pairs overlap layer by layer; those of orders executed by name run in sequence.
LAYER_BY_LAYER = "overlapped experts"


def name_of(training: TrainingConfig) -> str:
    if training.schedules_method == "dualpipev":
        return "dualpipev"
    if training.pipeline_schedule:
        return training.pipeline_schedule
    return "interleaved" if training.pp > 1 and training.vpp > 1 else "1f1b"


def chunks_of(training: TrainingConfig) -> int:
    if name_of(training).startswith("dualpipev"):
        return 2
    return training.vpp if training.pp > 1 else 1


def schedule(training: TrainingConfig, microbatches: int = 0) -> Schedule:
    """Schedule of `microbatches`, 0 for a step's; raises ArgumentError."""
    return built(*key(training, microbatches))


def fills_and_drains(training: TrainingConfig) -> bool:
    """Whether the last rank waits for all others' first forward, and they for its last backward."""
    return name_of(training) in ("1f1b", "interleaved") and not training.overlap_moe_expert_parallel_comm


def key(training: TrainingConfig, microbatches: int = 0) -> tuple[str, PipelineShape, bool]:
    count = microbatches or training.microbatches
    group = training.microbatch_group_size_per_vp_stage or training.pp
    shape = PipelineShape(training.pp, count, chunks_of(training), min(group, count))
    return name_of(training), shape, training.overlap_moe_expert_parallel_comm


@functools.lru_cache(maxsize=512)
def built(name: str, shape: PipelineShape, overlaps: bool) -> Schedule:
    if overlaps and name in ("interleaved", "1f1b"):
        # Even with one chunk, Megatron runs a forward ahead of each backward.
        return published.from_function(LAYER_BY_LAYER, published.interleaved_overlap, shape)
    if name == "interleaved":
        # Also for few micro-batches, with longer waits.
        return published.from_function(name, published.interleaved, shape)
    if name not in published.TRAINING_ORDERS:
        known = ", ".join(published.TRAINING_ORDERS)
        raise ArgumentError(f"--pipeline-schedule {name}: its memory is not predicted; that of {known} is")
    try:
        return published.build(name, shape)
    except OrderError as error:
        raise ArgumentError(f"pipeline schedule {error}") from None


def placement(training: TrainingConfig) -> Placement:
    if name_of(training).startswith("dualpipev"):
        return steps.v_placement(training.pp)
    return steps.interleaved_placement(training.pp, chunks_of(training))


@cached_by(
    "num_layers", "mtp_num_layers", "pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "schedules_method",
    "pipeline_schedule",
)  # fmt: skip
def chunks_of_ranks(training: TrainingConfig) -> tuple[tuple[Chunk, ...], ...]:
    where = placement(training)
    if chunks_of(training) != training.vpp:
        training = training.replace(num_virtual_stages_per_pipeline_rank=chunks_of(training))
    held = stages(training)
    return tuple(tuple(held[stage % training.pp][stage // training.pp] for stage in row) for row in where)
