"""Offloading of saved tensors: on CPU they are where offloading would move them."""

from __future__ import annotations

import contextlib
from typing import Any

from ..recorded import recorded


def mark_activation_offload(*tensors: Any) -> None:
    """Mark tensors for offloading."""
    for tensor in tensors:
        if tensor is not None:
            tensor.activation_offloading = True


@recorded
def get_cpu_offload_context(given: Any) -> Any:
    """Returns a context for a layer's forward pass and a function for its output."""
    if not given.offload_weights and not given.offload_activations:
        raise ValueError("CPU offloading is enabled while it is not mentioned what to offload")
    return contextlib.nullcontext(), lambda tensor: tensor
