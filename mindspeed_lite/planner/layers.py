"""Assigns layers to pipeline stages and chunks, as in Megatron."""

from __future__ import annotations

from dataclasses import dataclass

from . import layout
from .training import ArgumentError, TrainingConfig


@dataclass(frozen=True)
class Chunk:
    """Model part on one rank: all of it, a pipeline stage or a virtual stage.

    Attributes:
        layers: layer numbers in the model, from 0.
        embeds: has the embedding at its start.
        normalizes: has the final norm.
        further: number of MTP layers.
        computes_loss: has the output layer.
    """

    layers: tuple[int, ...]
    embeds: bool
    normalizes: bool
    further: int
    computes_loss: bool

    @property
    def has_embedding(self) -> bool:
        return self.embeds or self.further > 0


def kind(training: TrainingConfig, layer: int, place: int, number: int) -> object:
    """Layers of one kind are alike; `number`: index of the chunk on its rank."""
    counts_layers = (
        training.recompute_method == "block"
        or training.recompute_norm_num_layers is not None
        or training.recompute_activation_function_num_layers is not None
        or training.moe_zero_memory_num_layers is not None
    )
    communicates_by_layer = training.cp > 1 and (
        len(training.cp_comm_type) > 1 or training.context_parallel_cache_interval
    )
    return (
        training.is_moe(layer),
        training.window_of(layer),
        layer if communicates_by_layer else 0,
        (place, number) if counts_layers else 0,
    )


def stages(training: TrainingConfig) -> list[list[Chunk]]:
    """Chunks of each stage, in execution order."""
    if training.pipeline_model_parallel_layout:
        return _by_hand(training)
    pp, vpp = training.pp, training.vpp if training.pp > 1 else 1
    counts = _counts(training, pp, vpp)
    begin, found = 0, [[] for _ in range(pp)]  # type: ignore[var-annotated]
    for virtual in range(vpp):
        for stage in range(pp):
            embeds = (stage, virtual) == (0, 0)
            computes_loss = (stage, virtual) == (pp - 1, vpp - 1)
            count = counts[stage]
            count -= embeds and training.account_for_embedding_in_pipeline_split
            count -= computes_loss and training.account_for_loss_in_pipeline_split
            further = training.mtp_num_layers if computes_loss else 0
            found[stage].append(
                Chunk(tuple(range(begin, begin + count)), embeds, computes_loss, further, computes_loss)
            )
            begin += count
    return found


def _by_hand(training: TrainingConfig) -> list[list[Chunk]]:
    begin, found = 0, [[] for _ in range(training.pp)]  # type: ignore[var-annotated]
    for place, letters in enumerate(layout.parts(training.pipeline_model_parallel_layout)):
        count, further, computes_loss = letters.count("t"), letters.count("m"), "L" in letters
        # With MTP the final norm follows the last layer, in any chunk.
        ends = begin < training.num_layers == begin + count
        normalizes = ends if training.mtp_num_layers else computes_loss
        numbers = tuple(range(begin, begin + count))
        found[place % training.pp].append(Chunk(numbers, "E" in letters, normalizes, further, computes_loss))
        begin += count
    return found


def _counts(training: TrainingConfig, pp: int, vpp: int) -> list[int]:
    """Layers per chunk, including places counted for embedding and loss."""
    first, last = training.decoder_first_pipeline_num_layers, training.decoder_last_pipeline_num_layers
    rest = training.num_layers - (first or 0) - (last or 0)
    rest += training.account_for_embedding_in_pipeline_split + training.account_for_loss_in_pipeline_split
    others = pp - (first is not None) - (last is not None)
    if rest % max(1, others):
        raise ArgumentError(
            f"--num-layers {training.num_layers}: {rest} layers cannot be divided over {others} pipeline stages; "
            "change --num-layers or --pipeline-model-parallel-size, or give --decoder-first-pipeline-num-layers"
        )
    per_stage = [rest // max(1, others)] * pp
    if first is not None:
        per_stage[0] = first
    if last is not None:
        per_stage[-1] = last
    if any(each % vpp for each in per_stage):
        raise ArgumentError(
            f"--num-virtual-stages-per-pipeline-rank {vpp} does not divide the layers of each stage ({per_stage[0]}): "
            "change one of them"
        )
    return [each // vpp for each in per_stage]
