"""Parameters of a rank by its products, for times and bounds: norms and biases are left out.

What memory takes is traced (`traces`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from . import layer_work
from .layer_work import PartWork
from .layers import Chunk
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

    def __mul__(self, count: int) -> Parameters:
        return Parameters(self.dense * count, self.experts * count)

    @property
    def total(self) -> int:
        return self.dense + self.experts


def of_stage(training: TrainingConfig, chunks: Iterable[Chunk]) -> Parameters:
    layers = with_experts = further = words = 0
    for chunk in chunks:
        layers += len(chunk.layers)
        with_experts += sum(map(training.is_moe, chunk.layers)) if training.num_experts else 0
        further += chunk.further
        has_output = chunk.computes_loss and (training.untie_embeddings_and_output_weights or training.pp > 1)
        words += chunk.has_embedding + has_output
    found = Parameters(training.padded_vocab_size // training.tp * training.hidden_size) * words
    found += _of_layer(training, False) * (layers - with_experts)
    if with_experts:
        found += _of_layer(training, True) * with_experts
    if further:
        joined = Parameters(2 * training.hidden_size**2 // training.tp)
        found += (joined + _of_layer(training, training.is_moe(training.num_layers - 1))) * further
    return found


@functools.lru_cache(maxsize=1024)
def _of_layer(training: TrainingConfig, has_experts: bool) -> Parameters:
    dense = _weights(layer_work.attention(training, 0))
    if not has_experts:
        return Parameters(dense + _weights(layer_work.mlp(training)))
    inside = _weights(layer_work.experts(training))
    gates = 2 if training.gated else 1
    each = (gates + 1) * training.hidden_size * (training.moe_ffn_hidden_size // training.etp)
    routed = training.num_experts // training.ep * each
    return Parameters(dense + inside - routed, routed)


def _weights(work: PartWork) -> int:
    return sum(each.inner * each.columns * max(1, each.experts) for each in work.products)
