"""Predicts `--swap-attention`: saved tensors of chosen modules move to host memory.

Each pass keeps its last layer, which runs backward next; the previous layer is restored meanwhile. Storages under 1 MiB
stay, and so does everything on a CPU.
"""

from __future__ import annotations

from dataclasses import replace

from .pieces import MemoryEntry
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


def layers(training: TrainingConfig, kept: list[list[MemoryEntry]]) -> list[list[MemoryEntry]]:
    """Entries after forward; swapped bytes are restored later."""
    if not moves(training):
        return kept
    names = chosen(training)
    return [
        [_away(each) if _module(each) in names and each.bytes >= SMALLEST else each for each in layer]
        for layer in kept[:-1]
    ] + kept[-1:]


def _away(entry: MemoryEntry) -> MemoryEntry:
    return replace(entry, bytes=0, restored=entry.bytes + entry.restored)


def _module(entry: MemoryEntry) -> str:
    if entry.name == "mask of the hidden dropout":
        return ""
    if entry.name == "norm":
        return "input_layernorm" if entry.part == "attention" else "pre_mlp_layernorm"
    return "self_attention" if entry.part == "attention" else "mlp"
