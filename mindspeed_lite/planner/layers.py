"""Assigns layers to pipeline stages and chunks, as in Megatron."""

from __future__ import annotations

from dataclasses import dataclass, field

from . import layout
from .pieces import activation_is_recomputed, norm_is_recomputed, zero_memory_level
from .training import ArgumentError, TrainingConfig, Window, cached_by


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


@dataclass(frozen=True)
class LayerKind:
    """What layers of a model differ in. comm_type: of `--cp-comm-type`; number: where each layer is of its own kind."""

    has_experts: bool
    window: Window | None
    comm_type: str = ""
    number: int = 0
    is_recomputed: bool = False
    gives_norm: bool = False
    gives_activation_function: bool = False
    is_zero_memory: bool = False


def kind_of(training: TrainingConfig, layer: int, place: int, number: int) -> LayerKind:
    """place: in its chunk. number: of the chunk on its rank."""
    types, whole = training.cp_comm_type, training.recompute_granularity == "full"
    count = training.recompute_num_layers or 1
    return LayerKind(
        training.is_moe(layer),
        training.window_of(layer),
        (types[layer] if len(types) > 1 else types[0]) if types else "",
        layer if training.context_parallel_cache_interval else 0,
        whole and (training.recompute_method != "block" or place < count),
        norm_is_recomputed(training, place, number) and "layernorm" not in training.recompute_modules,
        activation_is_recomputed(training, place, number),
        training.is_moe(layer) and zero_memory_level(training, place, number) == (training.moe_zero_memory or None),
    )


@dataclass(frozen=True)
class KindCount:
    """Layers of a kind in a chunk. place, layer: of the first, in the chunk and in the model."""

    kind: LayerKind
    count: int
    place: int = field(compare=False)
    layer: int = field(compare=False)


# Fields on which the kinds of layers depend.
_KIND_FIELDS = (
    "num_experts", "moe_layer_freq", "moe_grouped_gemm", "moe_token_dispatcher_type", "window_size",
    "window_attn_skip_freq", "cp_comm_type", "context_parallel_cache_interval", "recompute_granularity",
    "recompute_method", "recompute_num_layers", "recompute_modules", "recompute_norm", "recompute_norm_num_layers",
    "recompute_activation_function", "recompute_activation_function_num_layers", "moe_zero_memory",
    "moe_zero_memory_num_layers", "num_virtual_stages_per_pipeline_rank",
)  # fmt: skip


@cached_by(*_KIND_FIELDS)
def kinds_in(training: TrainingConfig, layers: tuple[int, ...], number: int) -> tuple[LayerKind, ...]:
    """Of each layer of a chunk, the `number`-th on its rank."""
    return tuple(kind_of(training, layer, place, number) for place, layer in enumerate(layers))


@cached_by(*_KIND_FIELDS)
def counts_in(training: TrainingConfig, layers: tuple[int, ...], number: int) -> tuple[KindCount, ...]:
    found = kinds_in(training, layers, number)
    places = {kind: found.index(kind) for kind in found}
    return tuple(KindCount(kind, found.count(kind), place, layers[place]) for kind, place in places.items())


def kinds(training: TrainingConfig, last: bool = False) -> list[LayerKind]:
    """All of a model's, those first of whose features count layers."""
    if last:
        return [kind_of(training, training.num_layers - 1, training.num_layers, 0)]
    if not _counts_layers(training):
        varies = training.num_experts or training.window_attn_skip_freq or len(training.cp_comm_type) > 1
        layers = range(training.num_layers if varies or training.context_parallel_cache_interval else 1)
        return [*dict.fromkeys(kind_of(training, layer, 0, 0) for layer in layers)]
    found: dict[LayerKind, None] = {}
    for row in stages(training):
        for number, chunk in enumerate(row):
            for place, layer in enumerate(chunk.layers):
                found[kind_of(training, layer, place, number)] = None

    def order(kind: LayerKind) -> tuple[int, ...]:
        return -(kind.is_recomputed), -(kind.gives_norm + kind.gives_activation_function + kind.is_zero_memory)

    return sorted(found, key=order)


def _counts_layers(training: TrainingConfig) -> bool:
    """Whether a feature is of so many layers."""
    return (
        training.recompute_method == "block"
        or training.recompute_norm_num_layers is not None
        or training.recompute_activation_function_num_layers is not None
        or training.moe_zero_memory_num_layers is not None
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
