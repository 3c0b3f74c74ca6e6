"""Token counts, and which layers recompute what."""

from __future__ import annotations

from .training import TrainingConfig


def tokens(training: TrainingConfig) -> int:
    """Tokens inside attention and MLP."""
    return training.seq_length // training.cp * training.micro_batch_size


def norm_tokens(training: TrainingConfig) -> int:
    """Tokens between attention and MLP."""
    return tokens(training) // (training.tp if training.sequence_parallel else 1)


def is_chosen(training: TrainingConfig, number: int | None, place: int, chunk: int) -> bool:
    """Whether a layer is among the first `number` of its rank; None is all.

    Counts the first layer of every chunk, then the second ones.
    """
    whole = training.recompute_granularity == "full"
    passed_over = training.recompute_num_layers if whole and training.recompute_method == "block" else 0
    if place < passed_over or (whole and training.recompute_method != "block"):
        return False
    return number is None or (place - passed_over) * training.vpp + chunk < number


def norm_is_recomputed(training: TrainingConfig, place: int, chunk: int) -> bool:
    if training.recompute_granularity == "selective" and "layernorm" in training.recompute_modules:
        return True
    number = training.recompute_norm_num_layers
    return (training.recompute_norm or number is not None) and is_chosen(training, number, place, chunk)


def activation_is_recomputed(training: TrainingConfig, place: int, chunk: int) -> bool:
    number = training.recompute_activation_function_num_layers
    asked = training.recompute_activation_function or number is not None
    return asked and is_chosen(training, number, place, chunk)


def zero_memory_level(training: TrainingConfig, place: int, chunk: int) -> str:
    """What experts release: "level0", "level1" or nothing."""
    level, number = training.moe_zero_memory, training.moe_zero_memory_num_layers
    serves = training.moe_grouped_gemm and training.moe_token_dispatcher_type == "alltoall"
    if level not in ("level0", "level1") or not serves:
        return ""
    if is_chosen(training, number, place, chunk):
        return level
    return "level0" if level == "level1" and is_chosen(training, None, place, chunk) else ""
