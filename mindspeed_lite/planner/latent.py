"""Predicts parameters and saved tensors of multi-latent attention (DeepSeek-V2).

Norms and up-projections read parts of the latent tensors. TP gathers these and SP divides them by tokens again: the
query part is a view of all tokens, the key part a copy.
"""

from __future__ import annotations

from .pieces import MemoryEntry, keeps_norm_input, norm_bytes, norm_parameters, norm_tokens, tokens
from .training import ArgumentError, TrainingConfig


def parameters(training: TrainingConfig) -> int:
    hidden, heads = training.hidden_size, training.num_attention_heads // training.tp
    narrow, rotary = training.kv_lora_rank, training.qk_pos_emb_head_dim
    found = hidden * (narrow + rotary) // training.tp + narrow * heads * (training.qk_head_dim + training.v_head_dim)
    if training.q_lora_rank:
        found += training.q_lora_rank * (hidden // training.tp + heads * training.query_size)
    else:
        found += hidden * heads * training.query_size
    if training.qk_layernorm:
        found += norm_parameters(training, narrow)
        found += norm_parameters(training, training.q_lora_rank) if training.q_lora_rank else 0
    return found + hidden * (heads * training.value_size + training.add_bias_linear)


def projections(training: TrainingConfig) -> list[MemoryEntry]:
    found, queries, keys = [], training.q_lora_rank, training.kv_lora_rank
    if queries:
        found += _narrow(training, "queries", queries, tokens(training) * queries)
    is_copied = training.tp > 1 and training.sequence_parallel
    whole = keys + training.qk_pos_emb_head_dim
    found += _narrow(training, "keys and values", keys, norm_tokens(training) * (keys if is_copied else whole))
    if not training.use_fused_rotary_pos_emb:
        # In the model's dtype, for queries and keys.
        size = 2 * _angles(training)
        found.append(MemoryEntry("attention", "rotary angles", size))
    return found


def once(training: TrainingConfig, layers: int) -> list[MemoryEntry]:
    """Entries kept once; each layer has its own angles."""
    if not training.use_fused_rotary_pos_emb:
        return []
    # Yarn's are in the model's dtype, others in fp32.
    size = _angles(training) if training.rope_type == "yarn" else _angles(training) * 4 // training.width
    return [MemoryEntry("attention", "rotary angles", layers * size)]


def check(training: TrainingConfig) -> None:
    """Raises ArgumentError where Megatron's local implementation cannot train."""
    if not training.flash:
        raise ArgumentError(
            "--multi-latent-attention: Megatron's own local attention does not take its head sizes: add "
            "--use-flash-attn"
        )
    if training.rope_type not in ("rope", "yarn"):
        raise ArgumentError(f"--rope-type is rope or yarn, not {training.rope_type!r}")
    narrow = {"--q-lora-rank": training.q_lora_rank or 0}
    narrow["--kv-lora-rank and --qk-pos-emb-head-dim"] = training.kv_lora_rank + training.qk_pos_emb_head_dim
    for flag, width in narrow.items():
        if width % training.tp:
            raise ArgumentError(
                f"{flag}: {width} cannot be divided by --tensor-model-parallel-size {training.tp}: change one of them"
            )


def _narrow(training: TrainingConfig, name: str, width: int, storage: int) -> list[MemoryEntry]:
    """Entries of a projection whose output is part of `storage` elements."""
    rows, kept = norm_tokens(training), storage * training.width
    if not training.qk_layernorm:
        return [MemoryEntry("attention", f"input of the up-projection of {name}", kept)]
    size = norm_bytes(training, rows, width)
    if keeps_norm_input(training):
        size += kept - rows * width * training.width
    return [
        MemoryEntry("attention", f"norm of the narrow {name}", size),
        MemoryEntry("attention", f"input of the up-projection of {name}", rows * width * training.width),
    ]


def _angles(training: TrainingConfig) -> int:
    return 2 * training.seq_length // training.cp * training.qk_pos_emb_head_dim * training.width
