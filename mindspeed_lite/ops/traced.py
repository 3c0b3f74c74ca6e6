"""Whether a kernel that is handed addresses may be called."""

from __future__ import annotations

import torch

# Fake tensors, and other tensor subclasses, may have no memory.
_WITH_MEMORY = (torch.Tensor, torch.nn.Parameter)


def is_traced(x: torch.Tensor) -> bool:
    """Whether a compiler looks on, or `x` has no memory that an address or a number could be read from."""
    return torch.compiler.is_compiling() or type(x) not in _WITH_MEMORY
