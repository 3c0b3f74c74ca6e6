"""Whether a kernel that is handed addresses may be called."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

# Fake tensors, and other tensor subclasses, may have no memory.
_WITH_MEMORY = (torch.Tensor, torch.nn.Parameter)


def is_traced(x: torch.Tensor) -> bool:
    """Whether a compiler or a dispatch mode looks on, or `x` may have no memory to read an address or a number from."""
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or type(x) not in _WITH_MEMORY
