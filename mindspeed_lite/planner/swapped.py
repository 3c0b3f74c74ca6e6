"""Predicts `--swap-attention`: saved tensors of chosen modules move to host memory.

Each pass keeps its last layer, which runs backward next; the previous layer is restored meanwhile. Storages under 1 MiB
stay, and so does everything on a CPU.
"""

from __future__ import annotations

from .training import ArgumentError, TrainingConfig

SMALLEST = 1 << 20
MODULES = ("input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp")
# MindSpeed's names.
_ALSO = {"input_norm": "input_layernorm", "post_attention_norm": "pre_mlp_layernorm"}


def moves(training: TrainingConfig) -> bool:
    return training.swap_attention and training.device != "cpu"


def chosen(training: TrainingConfig) -> frozenset[str]:
    """Megatron's module names; raises ArgumentError."""
    names = [each.strip() for each in training.swap_modules.split(",") if each.strip()]
    found = frozenset(_ALSO.get(name, name) for name in names)
    for name in sorted(found - set(MODULES)):
        raise ArgumentError(f"--swap-modules {name}: only {', '.join(MODULES)} are predicted")
    return found


def is_moved(names: frozenset[str], path: str, count: int, size: int) -> bool:
    """path: of a module in its layer, whose `count` storages have `size` bytes."""
    return path.partition(".")[0] in names and size >= SMALLEST * count
