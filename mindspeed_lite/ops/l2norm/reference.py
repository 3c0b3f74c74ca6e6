"""l2norm in plain PyTorch: the norm of every tensor, then the norm of those, as Megatron computes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def l2norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """sqrt(sum x^2) over all elements of all tensors, in fp32, or in float64 where all of them are."""
    dtype = torch.float64 if all(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tensors), 2, dtype=dtype)))
    return norm
