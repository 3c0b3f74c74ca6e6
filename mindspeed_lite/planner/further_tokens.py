"""Predicts multi-token prediction (MTP) layers.

An MTP layer joins normalized hidden states and the next token's embedding in a linear layer, then runs a transformer
layer, a norm and its own loss.
"""

from __future__ import annotations

from . import activations
from .pieces import MemoryEntry, hidden_bytes, keeps_norm_input, norm_bytes, norm_parameters, norm_tokens, tokens
from .training import ArgumentError, TrainingConfig

PART = "further tokens"


def parameters(training: TrainingConfig) -> int:
    """Parameters per rank without the transformer layer: three norms, joining linear layer."""
    hidden = training.hidden_size
    return 3 * norm_parameters(training, hidden) + 2 * hidden * hidden // training.tp


def groups(training: TrainingConfig, place: int, chunk: int) -> list[list[MemoryEntry]]:
    """First such layer at a place of a chunk, in groups restored together."""
    norm, hidden = norm_bytes(training, norm_tokens(training), training.hidden_size), hidden_bytes(training)
    indices = tokens(training) * (8 if training.tp == 1 else 9)
    embedding = [MemoryEntry("embedding", "word indices of further tokens", indices)]
    embedding += activations.embedding_dropout(training)
    joined = [
        MemoryEntry(PART, "norms of hidden states and embedding", 2 * norm),
        MemoryEntry(PART, "input of the layer that joins them", 2 * hidden),
    ]
    if training.sequence_parallel and keeps_norm_input(training):
        # A view of the output gathered over ranks.
        joined.append(MemoryEntry(PART, "output of the layer that joins them", (training.tp - 1) * hidden))
    # The model's last layer, numbered from 1 again.
    layer = activations.layer(training, training.num_layers - 1, place, chunk, attention=0)
    behind = [MemoryEntry(PART, "norm", norm)]
    if training.recompute_granularity == "full" and training.recompute_method == "uniform":
        inside = [*joined, *layer, *behind]
        again = sum(entry.bytes for entry in inside) - (2 * hidden if keeps_norm_input(training) else 0)
        kept = MemoryEntry(PART, "hidden states and embedding, of which a layer is recomputed", 2 * hidden)
        return [embedding, [kept, MemoryEntry(PART, "recomputed", 0, again)]]
    halves = ([each for each in layer if (each.part == "attention") == first] for first in (True, False))
    return [embedding, joined, *halves, behind]


def loss(training: TrainingConfig) -> list[MemoryEntry]:
    rows = tokens(training)
    own = [each for each in activations.logits(training) if each.name != activations.OUTPUT_INPUT]
    # Labels and the unmasked loss.
    found = [*own, MemoryEntry("output", "loss of further tokens", 12 * rows)]
    hidden = MemoryEntry("output", activations.OUTPUT_INPUT, hidden_bytes(training))
    return [hidden, *found] * training.mtp_num_layers


def check(training: TrainingConfig) -> None:
    """Raises ArgumentError for unsupported combinations."""
    if training.use_fused_linear_cross_entropy:
        raise ArgumentError(
            "--use-fused-linear-cross-entropy: with --mtp-num-layers Megatron needs the logits: use "
            "--use-fused-cross-entropy"
        )
    is_whole = training.recompute_granularity == "full" and training.recompute_method == "uniform"
    if is_whole and training.recompute_num_layers > 1:
        raise ArgumentError("--recompute-num-layers: with --mtp-num-layers it is 1, as in Megatron")
    if training.position_embedding_type not in ("rope", "none"):
        raise ArgumentError(
            f"--position-embedding-type {training.position_embedding_type}: with --mtp-num-layers it is rope or none, "
            "as in Megatron"
        )
