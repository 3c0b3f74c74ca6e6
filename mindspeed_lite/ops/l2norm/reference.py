"""The definition of l2norm in plain PyTorch: what every backend is tested against."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def l2norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """sqrt(sum x^2) over all elements of all tensors, in fp32, or in float64 where all of them are."""
    dtype = dtype_of(tensors)
    norms = [torch.linalg.vector_norm(tensor, dtype=dtype) for tensor in tensors]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def dtype_of(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """What is summed in."""
    return torch.float64 if all(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
