"""The older form of `cpu_offload`."""

from __future__ import annotations

from typing import Any

from . import cpu_offload


def mark_activation_offload(*tensors: Any, offload: bool = True) -> None:
    """Mark tensors for offloading."""
    if offload:
        cpu_offload.mark_activation_offload(*tensors)


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
) -> Any:
    """Returns a context for a layer's forward pass and a function for its output."""
    return cpu_offload.get_cpu_offload_context(
        enabled, num_layers, model_layers, offload_activations, offload_weights, double_buffering
    )
