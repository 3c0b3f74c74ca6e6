"""Lists tensors a MoE layer saves, for even or given expert load.

Without `--moe-router-force-load-balancing` the real load may be uneven.
"""

from __future__ import annotations

import math

from .optimizer import gradient_width
from .pieces import (
    MemoryEntry,
    activation_is_recomputed,
    given_up,
    mlp,
    mlp_parameters,
    norm_tokens,
    tokens,
    zero_memory_level,
)
from .training import TrainingConfig


def routed(training: TrainingConfig) -> int:
    # All ranks send equally many; an expert split over ranks gets each rank's tokens.
    count = norm_tokens(training) * training.moe_router_topk
    # Each rank alone has all experts, and all tokens.
    even = round(count * training.expert_load) if training.ep > 1 else count
    factor = training.moe_expert_capacity_factor
    if factor is not None:
        # Capacity per rank and expert: drops excess tokens, padding fills up.
        most = math.ceil(count / training.num_experts * factor) * training.num_experts
        even = most if training.moe_pad_expert_input_to_capacity else min(even, most)
    return even * training.etp


def experts(training: TrainingConfig, place: int, chunk: int) -> list[MemoryEntry]:
    """Entries of a MoE layer without the router's input."""
    gives_up, level = activation_is_recomputed(training, place, chunk), zero_memory_level(training, place, chunk)
    rows, chosen = norm_tokens(training), routed(training)
    found = [_router(training, rows), _order(training, rows)]
    size = chosen * training.hidden_size * training.width
    found.append(given_up("experts", "tokens in the order of their experts", size, bool(level)))
    if level:
        # For unpermutation.
        found.append(MemoryEntry("experts", "map of tokens and experts", rows * training.num_experts))
    local = training.moe_ffn_hidden_size // training.etp
    found += mlp(training, "experts", chosen, local, gives_up or bool(level), gives_up_input=level == "level1")
    found.append(MemoryEntry("experts", "weights of the tokens", chosen * training.width))
    if training.moe_shared_expert_intermediate_size:
        local = training.moe_shared_expert_intermediate_size // training.tp
        gives_input = level == "level1" and not gives_up
        found += mlp(
            training, "experts", tokens(training), local, gives_up or bool(level), " of the shared experts", gives_input
        )
    if training.balanced_moe_experts and training.ep > 1 and training.moe_token_dispatcher_type == "alltoall":
        found.append(_copies(training))
    return found


def _router(training: TrainingConfig, rows: int) -> MemoryEntry:
    # Chosen indices and probabilities; scores of all for the auxiliary loss.
    size = 12 * rows * training.moe_router_topk
    if training.has_aux_loss:
        size += 4 * rows * training.num_experts
    return MemoryEntry("experts", "scores and choice of the router", size)


def _order(training: TrainingConfig, rows: int) -> MemoryEntry:
    chosen = rows * training.moe_router_topk
    # Without the operator: sort of the whole routing map, and gathered results.
    plain = 8 * rows * training.num_experts + 8 * chosen
    return MemoryEntry(
        "experts", "order of the tokens", 4 * (2 * chosen + rows) if training.moe_permute_fusion else plain
    )


def _copies(training: TrainingConfig) -> MemoryEntry:
    """Hot-expert copies at their maximum, with gradients if GEMMs add to main gradients."""
    each = mlp_parameters(training, training.moe_ffn_hidden_size, training.etp)
    number = min(training.balanced_moe_hot_expert_num, training.num_experts)
    width = training.width + (gradient_width(training) if training.fuses_accumulation else 0)
    return MemoryEntry("experts", "copies of hot experts, at most", number * each * width)
