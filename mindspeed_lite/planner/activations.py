"""Lists the tensors one micro-batch saves for backward on one rank.

An entry is a storage held by autograd, counted once and whole. Models Megatron's local implementation, torch's
operators, and features' operators. Sequence parallelism divides tokens outside linear layers by TP.
"""

from __future__ import annotations

from . import context, latent
from .experts import experts
from .pieces import (
    MemoryEntry,
    activation_is_recomputed,
    given_up,
    hidden_bytes,
    keeps_norm_input,
    mask_width,
    mlp,
    norm_bytes,
    norm_is_recomputed,
    norm_tokens,
    tokens,
)
from .training import TrainingConfig


def layer(
    training: TrainingConfig, number: int, place: int, chunk: int, *, attention: int | None = None
) -> list[MemoryEntry]:
    """Layer `number` at a place of a chunk, from 0; attention: its number for attention, if different."""
    has_experts = training.is_moe(number)
    gives_up, hidden = norm_is_recomputed(training, place, chunk), hidden_bytes(training)
    part = "experts" if has_experts else "mlp"
    name = "input of the router" if has_experts else "input of the first linear layer"
    if has_experts:
        inside = experts(training, place, chunk)
    else:
        width = training.ffn_hidden_size // training.tp
        inside = mlp(training, part, tokens(training), width, activation_is_recomputed(training, place, chunk))
    if (
        training.recompute_granularity == "selective"
        and ("moe" if has_experts else "mlp") in training.recompute_modules
    ):
        inside = [MemoryEntry(part, "recomputed as a whole", 0, sum(each.bytes for each in inside))]
    return [
        _norm(training, "attention", gives_up),
        given_up("attention", "input of the qkv layer", hidden, gives_up),
        *_attention(training, number if attention is None else attention),
        *_dropout(training, "attention"),
        _norm(training, part, gives_up),
        given_up(part, name, hidden, gives_up),
        *inside,
        *_dropout(training, part),
    ]


def embedding(training: TrainingConfig) -> list[MemoryEntry]:
    words = 8 * tokens(training)
    learned = training.position_embedding_type == "learned_absolute" and training.add_position_embedding
    # A vocabulary shard makes its own indices.
    size = words if training.tp == 1 else words + tokens(training)
    if training.cp > 1:
        # Copies its part of the sequence; positions stay.
        size += words * learned
    elif training.tp == 1:
        # One storage with labels and positions.
        size *= 3
    return [MemoryEntry("embedding", "word indices", size), *embedding_dropout(training)]


def embedding_dropout(training: TrainingConfig) -> list[MemoryEntry]:
    return _dropout(training, "embedding")


# Bytes the fused output loss keeps of logits, and tile columns.
KEPT_LOGITS_BYTES, TILE = 1 << 28, 64


def _kept(whole: int, column: int) -> int:
    """Bytes kept of `whole` bytes of logits, with `column` bytes per column."""
    if whole <= KEPT_LOGITS_BYTES:
        return whole
    columns = KEPT_LOGITS_BYTES // column
    return columns // TILE * TILE * column if 4 * columns * column >= whole else 0


OUTPUT_INPUT = "input of the output layer"


def final_norm(training: TrainingConfig) -> list[MemoryEntry]:
    return [_norm(training, "output", False)]


def loss(training: TrainingConfig) -> list[MemoryEntry]:
    return [*logits(training), MemoryEntry("output", "mask of the loss", 4 * tokens(training))]


def logits(training: TrainingConfig) -> list[MemoryEntry]:
    rows, hidden = tokens(training), hidden_bytes(training)
    logits, found = rows * (training.padded_vocab_size // training.tp), []
    if training.use_fused_linear_cross_entropy:
        # Sharded hidden states are gathered first.
        hidden *= training.tp if training.sequence_parallel else 1
        statistics = MemoryEntry("output", "targets and statistics of the loss", 20 * rows)
        kept = MemoryEntry("output", "logits that are kept", _kept(logits * training.width, rows * training.width))
        found += [MemoryEntry("output", OUTPUT_INPUT, hidden), kept, statistics]
    elif training.use_fused_cross_entropy:
        statistics = MemoryEntry("output", "targets and statistics of the loss", 20 * rows)
        found += [MemoryEntry("output", OUTPUT_INPUT, hidden)]
        found += [MemoryEntry("output", "logits", logits * training.width), statistics]
    else:
        width = 2 if training.fp16_lm_cross_entropy and training.fp16 else 4
        found += [MemoryEntry("output", OUTPUT_INPUT, hidden)]
        found += [MemoryEntry("output", "softmax of the logits", logits * width)]
        found += [MemoryEntry("output", "targets of the loss", 9 * rows)]
    return found


def once(training: TrainingConfig, layers: int, has_mask: bool) -> list[MemoryEntry]:
    """Return the activations that all layers and micro-batches of a chunk share."""
    found = []
    angles = 8 * training.seq_length // training.cp * training.kv_channels
    if training.multi_latent_attention:
        found += latent.once(training, layers)
    elif training.position_embedding_type == "rope":
        if training.use_fused_rotary_pos_emb:
            found.append(MemoryEntry("attention", "rotary angles", angles))
        if training.recompute_granularity == "full":
            found.append(MemoryEntry("attention", "rotary angles, of which layers are recomputed", angles // 2))
    # The CPU's causal softmax needs no mask; the NPU's does.
    needs_none = training.fuses_softmax and training.device == "cpu"
    if not (training.flash or needs_none or has_mask):
        found.append(MemoryEntry("attention", "causal mask", training.seq_length**2))
    return found


def mask(training: TrainingConfig) -> list[MemoryEntry]:
    return (
        [] if training.flash else [MemoryEntry("attention", "mask", training.micro_batch_size * training.seq_length**2)]
    )


def _norm(training: TrainingConfig, part: str, gives_up: bool) -> MemoryEntry:
    own, hidden = norm_bytes(training, norm_tokens(training), training.hidden_size), hidden_bytes(training)
    if not gives_up:
        return MemoryEntry(part, "norm", own)
    # Recomputation keeps the norm's input, then the usual entries.
    return MemoryEntry(part, "norm", hidden, own - (hidden if keeps_norm_input(training) else 0))


def _dropout(training: TrainingConfig, part: str) -> list[MemoryEntry]:
    if training.hidden_dropout == 0:
        return []
    if part != "embedding" and training.has_dropout_to_fuse and training.use_bias_dropout_fusion:
        return []
    # Megatron compiles dropout inside a layer; compiled masks are bytes.
    is_compiled = part != "embedding" and training.bias_dropout_fusion and training.jit_fuser
    width = 1 if is_compiled else mask_width(training)
    return [MemoryEntry(part, "mask of the hidden dropout", norm_tokens(training) * training.hidden_size * width)]


def _attention(training: TrainingConfig, number: int) -> list[MemoryEntry]:
    rows, size = tokens(training), training.kv_channels
    heads, groups = training.num_attention_heads // training.tp, training.local_groups
    query, key = (rows * count * training.query_size * training.width for count in (heads, groups))
    is_recomputed = training.recompute_granularity == "selective" and "core_attn" in training.recompute_modules
    found, is_latent = [], training.multi_latent_attention
    rotates = training.position_embedding_type == "rope" and not is_latent
    if is_latent:
        found += latent.projections(training)
    elif rotates and not training.use_fused_rotary_pos_emb:
        # In the model's dtype, for queries and keys.
        found.append(
            MemoryEntry("attention", "rotary angles", 4 * training.seq_length // training.cp * size * training.width)
        )
    is_normed = training.qk_layernorm and not is_latent
    is_seen = is_normed and keeps_norm_input(training)
    if is_normed:
        both = norm_bytes(training, rows * heads, size) + norm_bytes(training, rows * groups, size)
        # Inputs are projection views, except a query joined from several groups.
        both -= (key if heads > groups > 1 else query + key) if is_seen else 0
        found.append(MemoryEntry("attention", "norms of query and key", both))
    scores = _scores(training, heads, number)
    output = MemoryEntry("attention", "output of attention", rows * heads * training.value_size * training.width)
    if training.cp > 1 and context.sharing(training, number) > 1 and not is_recomputed:
        # Exchanged tensors replace computed ones, except those a norm saved.
        if is_seen:
            found.append(MemoryEntry("attention", "output of the qkv layer", query + 2 * key))
        return [*found, *context.exchanged(training, number), *scores, output]
    # Without rotation or norm they are projection views; Megatron repeats heads for its GEMMs.
    is_apart, repeats = rotates or is_normed or is_latent, heads > groups and not training.flash
    if is_apart or repeats or heads > groups > 1:
        found.append(MemoryEntry("attention", "query", query))
    if repeats and not is_recomputed:
        found.append(MemoryEntry("attention", "key and value, repeated for every head", 2 * query))
    elif is_apart:
        found.append(MemoryEntry("attention", "key", key))
    if is_latent:
        found.append(MemoryEntry("attention", "value", output.bytes))
    elif not repeats or is_recomputed or is_seen:
        found.append(MemoryEntry("attention", "output of the qkv layer, of which value is a part", query + 2 * key))
    if is_recomputed:
        again = sum(each.bytes for each in scores) + (2 * query if repeats else 0)
        if training.cp > 1 and context.sharing(training, number) > 1:
            again += sum(each.bytes for each in context.exchanged(training, number))
        scores = [MemoryEntry("attention", "scores, recomputed", 0, again)]
    return [*found, *scores, output]


def _scores(training: TrainingConfig, heads: int, number: int) -> list[MemoryEntry]:
    rows = tokens(training) * heads
    if training.flash:
        statistics = MemoryEntry("attention", "statistics of the softmax", 4 * rows)
        return [statistics, *(context.received(training, number) if training.cp > 1 else ())]
    count = rows * training.seq_length
    found = [MemoryEntry("attention", "softmax of the scores", count * training.width)]
    if training.fuses_softmax:
        if training.device == "cpu":
            found.append(
                MemoryEntry("attention", "scores, and statistics of their softmax", count * training.width + 8 * rows)
            )
        elif training.create_attention_mask_in_dataloader:
            # The NPU's saves probabilities and materialises a given mask.
            found.append(
                MemoryEntry("attention", "mask of the scores", training.micro_batch_size * training.seq_length**2)
            )
    elif training.attention_softmax_in_fp32 and training.width == 2:
        found.append(MemoryEntry("attention", "softmax of the scores in fp32", count * 4))
    if training.attention_dropout > 0:
        found.append(MemoryEntry("attention", "mask of the attention dropout", count * mask_width(training)))
        found.append(MemoryEntry("attention", "scores after dropout", count * training.width))
    return found
