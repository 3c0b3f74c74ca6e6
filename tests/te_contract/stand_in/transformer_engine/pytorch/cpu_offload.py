"""Offloading of saved tensors: on CPU they are where offloading would move them."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def mark_activation_offload(*tensors: Any) -> None:
    """Mark tensors for offloading."""
    for tensor in tensors:
        if tensor is not None:
            tensor.activation_offloading = True


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: torch.cuda.Stream | None = None,
) -> Any:
    """Returns a context for a layer's forward pass and a function for its output."""
    if not offload_weights and not offload_activations:
        raise ValueError("CPU offloading is enabled while it is not mentioned what to offload")
    return contextlib.nullcontext(), lambda tensor: tensor
