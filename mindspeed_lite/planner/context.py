"""Algorithms of context parallelism, and what they divide."""

from __future__ import annotations

from typing import Literal

from .training import ArgumentError, TrainingConfig

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
