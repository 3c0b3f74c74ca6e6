"""The older form of `cpu_offload`."""

from __future__ import annotations

from typing import Any

from . import cpu_offload
from .cpu_offload import get_cpu_offload_context as get_cpu_offload_context


def mark_activation_offload(*tensors: Any, offload: bool = True) -> None:
    """Mark tensors for offloading."""
    if offload:
        cpu_offload.mark_activation_offload(*tensors)
