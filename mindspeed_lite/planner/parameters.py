"""Exact parameter count of a rank, dense and expert."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from . import further_tokens, latent
from .layers import Chunk
from .pieces import mlp_parameters, norm_parameters
from .training import TrainingConfig


@dataclass(frozen=True)
class Parameters:
    """Parameters of one rank, by gradient reduction group.

    Attributes:
        dense: reduced over data-parallel ranks.
        experts: reduced over expert-data-parallel ranks.
    """

    dense: int
    experts: int = 0

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(self.dense + other.dense, self.experts + other.experts)

    @property
    def total(self) -> int:
        return self.dense + self.experts


def of_stage(training: TrainingConfig, chunks: Iterable[Chunk]) -> Parameters:
    found = Parameters(0)
    for chunk in chunks:
        if chunk.has_embedding:
            found += Parameters(_embedding(training))
        with_experts = sum(map(training.is_moe, chunk.layers))
        for has_experts, count in ((True, with_experts), (False, len(chunk.layers) - with_experts)):
            if count:
                one = of_layer(training, has_experts)
                found += Parameters(one.dense * count, one.experts * count)
        if chunk.normalizes:
            found += Parameters(norm_parameters(training, training.hidden_size))
        for _ in range(chunk.further):
            found += Parameters(further_tokens.parameters(training))
            found += of_layer(training, training.is_moe(training.num_layers - 1))
        if chunk.computes_loss:
            found += Parameters(_output_layer(training))
    return found


def of_layer(training: TrainingConfig, has_experts: bool) -> Parameters:
    dense = _attention(training) + 2 * norm_parameters(training, training.hidden_size)
    if not has_experts:
        return Parameters(dense + mlp_parameters(training, training.ffn_hidden_size, training.tp))
    hidden = training.hidden_size
    # Router, with bias if linear layers have one.
    dense += training.num_experts * (hidden + training.add_bias_linear)
    shared = training.moe_shared_expert_intermediate_size
    if shared:
        dense += mlp_parameters(training, shared, training.tp) + hidden * training.moe_shared_expert_gate
    local = training.num_experts // training.ep
    return Parameters(dense, local * mlp_parameters(training, training.moe_ffn_hidden_size, training.etp))


def _embedding(training: TrainingConfig) -> int:
    words = training.padded_vocab_size // training.tp * training.hidden_size
    learned = training.position_embedding_type == "learned_absolute" and training.add_position_embedding
    positions = training.max_position_embeddings or training.seq_length
    return words + (positions * training.hidden_size if learned else 0)


def _output_layer(training: TrainingConfig) -> int:
    # Tied weights are the embedding; the last pipeline stage has a copy.
    if not training.untie_embeddings_and_output_weights and training.pp == 1:
        return 0
    return training.padded_vocab_size // training.tp * training.hidden_size


def _attention(training: TrainingConfig) -> int:
    if training.multi_latent_attention:
        return latent.parameters(training)
    hidden, size = training.hidden_size, training.kv_channels
    heads = training.num_attention_heads // training.tp
    groups = training.local_groups
    projected = (heads + 2 * groups) * size
    has_qkv_bias = training.add_bias_linear or training.add_qkv_bias
    found = projected * (hidden + has_qkv_bias) + heads * size * hidden
    # Row-parallel bias follows the sum over ranks: replicated.
    found += hidden * training.add_bias_linear
    return found + (2 * norm_parameters(training, size) if training.qk_layernorm else 0)
