"""Common pieces of layers: token counts, recomputation, norms and MLPs."""

from __future__ import annotations

from dataclasses import dataclass

from .training import TrainingConfig


@dataclass(frozen=True)
class MemoryEntry:
    """One saved storage.

    Attributes:
        part: of the model.
        bytes: per micro-batch and layer.
        restored: released bytes restored in this layer's backward.
    """

    part: str
    name: str
    bytes: int
    restored: int = 0


def tokens(training: TrainingConfig) -> int:
    """Tokens inside attention and MLP."""
    return training.seq_length // training.cp * training.micro_batch_size


def norm_tokens(training: TrainingConfig) -> int:
    """Tokens between attention and MLP."""
    return tokens(training) // (training.tp if training.sequence_parallel else 1)


def hidden_bytes(training: TrainingConfig) -> int:
    """Hidden-state bytes between attention and MLP, per micro-batch and rank."""
    return norm_tokens(training) * training.hidden_size * training.width


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


def given_up(part: str, name: str, size: int, gives_up: bool) -> MemoryEntry:
    return MemoryEntry(part, name, 0, size) if gives_up else MemoryEntry(part, name, size)


def norm_parameters(training: TrainingConfig, width: int) -> int:
    return width if training.normalization == "RMSNorm" else 2 * width


def mlp_parameters(training: TrainingConfig, width: int, split: int) -> int:
    """Parameters of an MLP split over `split` ranks."""
    local = width // split
    first = local * (2 if training.gated else 1)
    bias = training.add_bias_linear
    return first * (training.hidden_size + bias) + local * training.hidden_size + training.hidden_size * bias


def keeps_norm_input(training: TrainingConfig) -> bool:
    """Whether a norm saves its input unchanged.

    torch fuses RMSNorm only on CUDA; composed, it saves the fp32 input and the normalized one.
    """
    return training.normalization != "RMSNorm" or training.use_fused_rmsnorm or training.device == "cuda"


def norm_bytes(training: TrainingConfig, rows: int, width: int) -> int:
    if not keeps_norm_input(training):
        return 8 * rows * width + 4 * rows
    # Mean and deviation; torch's CPU LayerNorm saves them in the model's dtype.
    narrow = training.normalization != "RMSNorm" and not training.use_fused_layernorm and training.device == "cpu"
    statistics = rows * (1 if training.normalization == "RMSNorm" else 2)
    return training.width * rows * width + (training.width if narrow else 4) * statistics


def mask_width(training: TrainingConfig) -> int:
    """Bytes per dropout mask element: the model's dtype on the CPU (scaled), else 1."""
    return training.width if training.device == "cpu" else 1


def mlp(
    training: TrainingConfig,
    part: str,
    rows: int,
    width: int,
    gives_up: bool,
    of: str = "",
    gives_up_input: bool = False,
) -> list[MemoryEntry]:
    """Entries of an MLP without its input."""
    size = rows * width * training.width
    middle = 2 * size if training.gated else size
    found = [given_up(part, f"input of the activation{of}", middle, gives_up_input)]
    if training.gated and not (training.bias_swiglu_fusion or training.use_fused_swiglu):
        found.append(MemoryEntry(part, f"both factors of the gate{of}", 2 * size))
    return [*found, given_up(part, f"output of the activation{of}", size, gives_up)]
