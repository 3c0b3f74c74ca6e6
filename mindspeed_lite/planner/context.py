"""Predicts attention tensors saved under context parallelism.

Ring and gathered keys keep the rank's own rows; a ring's cache adds received blocks within the window. Ulysses keeps
exchanged queries, keys, values and output, and the returned output.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

from .pieces import MemoryEntry, tokens
from .training import ArgumentError, TrainingConfig, Window

Algorithm = Literal["ring", "ulysses", "hybrid", "gathered"]

# MindSpeed's and Megatron's names.
ALGORITHMS: dict[str, Algorithm] = {
    "megatron_cp_algo": "ring",
    "ulysses_cp_algo": "ulysses",
    "hybrid_cp_algo": "hybrid",
    "kvallgather_cp_algo": "gathered",
}
COMM_TYPES: dict[str, Algorithm] = {
    "p2p": "ring",
    "a2a": "ulysses",
    "a2a+p2p": "hybrid",
    "all_gather": "gathered",
    "allgather": "gathered",
}


def algorithm(training: TrainingConfig, layer: int) -> Algorithm:
    if training.context_parallel_algo:
        return ALGORITHMS[training.context_parallel_algo]
    types = training.cp_comm_type
    if types:
        return COMM_TYPES[types[layer] if len(types) > 1 else types[0]]
    if training.ulysses_degree_in_cp:
        return "hybrid"
    if training.use_ulysses_allgather_kv:
        return "ulysses"
    if training.cp_window_size > 1 or training.use_cp_send_recv_overlap or training.context_parallel_kv_cache_policy:
        return "ring"
    return _least_exposed(training)


def sharing(training: TrainingConfig, layer: int) -> int:
    kind = algorithm(training, layer)
    if kind == "hybrid":
        return training.ulysses_degree_in_cp or training.hierarchical_context_parallel_sizes[0]
    return training.cp if kind == "ulysses" else 1


def exchanged(training: TrainingConfig, layer: int) -> list[MemoryEntry]:
    """Tensors kept between Ulysses exchanges, except statistics."""
    ranks = sharing(training, layer)
    numbers = tokens(training) * ranks * (training.num_attention_heads // training.tp // ranks) * training.width
    # Its heads are a view of all gathered keys.
    gathered = tokens(training) * ranks * training.local_groups * training.width
    sizes = (training.query_size, training.value_size)
    keys, values = (
        gathered * size if training.use_ulysses_allgather_kv else _heads(training, layer, size) for size in sizes
    )
    return [
        MemoryEntry("attention", "queries of its heads", numbers * training.query_size),
        MemoryEntry("attention", "keys and values of its heads", keys + values),
        MemoryEntry("attention", "output of its heads", numbers * training.value_size),
    ]


def received(training: TrainingConfig, layer: int) -> list[MemoryEntry]:
    """Tensors in a ring's cache."""
    policy, ranks = training.context_parallel_kv_cache_policy, training.cp // sharing(training, layer)
    if not policy or algorithm(training, layer) not in ("ring", "hybrid"):
        return []
    if layer % (training.context_parallel_cache_interval + 1):
        return []
    name = "keys and values" if policy == "full" else "keys"
    sizes = (training.query_size, training.value_size)[: 2 if policy == "full" else 1]
    blocks = blocks_received(ranks, training.seq_length // (2 * ranks), training.window_of(layer))
    size = blocks * sum(_heads(training, layer, each) for each in sizes)
    return [MemoryEntry("attention", f"{name} that the ring received", size)]


@functools.lru_cache(maxsize=64)
def blocks_received(ranks: int, chunk: int, window: Window | None) -> int:
    """Most blocks of other ranks that any rank computes with.

    Rank r holds chunks r and 2P - 1 - r, of `chunk` rows each; a sliding window excludes some.
    """
    if window is None:
        return ranks - 1
    before, after = (math.inf if limit < 0 else limit for limit in window)

    def owner(number: int) -> int:
        return min(number, 2 * ranks - 1 - number)

    def is_seen(keys: int, queries: int) -> bool:
        return (keys + 1) * chunk - 1 >= queries * chunk - before and keys * chunk <= (queries + 1) * chunk - 1 + after

    def owners(rank: int) -> set[int]:
        own = rank, 2 * ranks - 1 - rank
        return {owner(keys) for keys in range(2 * ranks) for queries in own if is_seen(keys, queries)} - {rank}

    return max(len(owners(rank)) for rank in range(ranks))


def _heads(training: TrainingConfig, layer: int, size: int) -> int:
    ranks = sharing(training, layer)
    groups = max(1, training.local_groups // ranks)
    return tokens(training) * ranks * groups * size * training.width


def check(training: TrainingConfig) -> None:
    """Raises ArgumentError for conflicting or unsupported flags."""
    size, degree = training.cp, training.ulysses_degree_in_cp
    if size == 1:
        return
    rows = 2 * size * (training.tp if training.sequence_parallel else 1)
    if training.seq_length % rows:
        raise ArgumentError(
            f"--seq-length {training.seq_length} cannot be divided by {rows}, two chunks for each of "
            f"--context-parallel-size {size} ranks{' times tensor parallelism' if rows > 2 * size else ''}: change one "
            "of them"
        )
    for name in ("reset_attention_mask", "sft", "dataloader_inter_document_masking"):
        if getattr(training, name):
            flag = f"--{name.replace('_', '-')}"
            raise ArgumentError(f"{flag}: masks and packs under context parallelism are not predicted: leave it out")
    _check_names(training)
    if degree and (degree < 2 or size % degree or degree == size):
        raise ArgumentError(
            f"--ulysses-degree-in-cp {degree} must divide --context-parallel-size {size} and lie between 1 and it: "
            "change one of them"
        )
    for layer in range(training.num_layers if training.cp_comm_type else 1):
        kind = algorithm(training, layer)
        if kind == "hybrid" and not (degree or len(training.hierarchical_context_parallel_sizes) == 2):
            raise ArgumentError(
                "hybrid_cp_algo needs --ulysses-degree-in-cp, the number of ranks that share heads: add it"
            )
        _check_heads(training, layer)


def divides_heads(training: TrainingConfig, ranks: int) -> bool:
    heads, groups = training.num_attention_heads // training.tp, training.local_groups
    return heads % ranks == 0 and (groups % ranks == 0 or ranks % groups == 0)


def _check_names(training: TrainingConfig) -> None:
    algorithm, types = training.context_parallel_algo, training.cp_comm_type
    if algorithm and algorithm not in ALGORITHMS:
        raise ArgumentError(f"--context-parallel-algo {algorithm}: it is one of {', '.join(ALGORITHMS)}")
    for each in set(types) - set(COMM_TYPES):
        raise ArgumentError(f"--cp-comm-type {each}: it is one of {', '.join(COMM_TYPES)}")
    if len(types) not in (0, 1, training.num_layers):
        raise ArgumentError(
            f"--cp-comm-type has {len(types)} values for {training.num_layers} layers: give one, or one for each layer"
        )
    if training.context_parallel_kv_cache_policy not in ("", "full", "half"):
        raise ArgumentError(
            f"--context-parallel-kv-cache-policy is full or half, not {training.context_parallel_kv_cache_policy!r}"
        )


def _check_heads(training: TrainingConfig, layer: int) -> None:
    ranks = sharing(training, layer)
    if not divides_heads(training, ranks):
        heads = training.num_attention_heads // training.tp
        raise ArgumentError(
            f"Ulysses over {ranks} ranks: {heads} query heads and {training.local_groups} key heads of a "
            "tensor-parallel rank give the ranks unequal shares, which are not predicted: change "
            "--context-parallel-algo or --ulysses-degree-in-cp"
        )


def _least_exposed(training: TrainingConfig) -> Algorithm:
    try:
        from mindspeed_lite.parallel.context.cost import FLOPS_PER_BYTE, AttentionWork, choose
    except (ImportError, OSError) as error:
        raise ArgumentError(
            f"the algorithm is chosen by code that needs torch ({error}): name one with --context-parallel-algo"
        ) from None
    sizes = training.query_size, training.value_size
    heads, groups = training.num_attention_heads // training.tp, training.local_groups
    rows = training.seq_length // training.cp
    work = AttentionWork(
        rows, training.micro_batch_size, heads, groups, *sizes, training.width, training.cp, causal=True
    )
    found: Algorithm = choose(work, FLOPS_PER_BYTE[training.device])[0]  # type: ignore[assignment]
    return found
