"""2-norm of a list of gradients, for clipping."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def l2norm(tensors: Sequence[Tensor]) -> Tensor:
    """sqrt(sum of squares of all elements), a 0-d fp32 tensor; a norm of norms, as in Megatron.

    tensors: at least one, on one device, any floating-point dtypes. float64 if all are. PyTorch's foreach norm is the
    fastest on every device.
    """
    dtype = torch.float64 if all(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tensors), 2, dtype=dtype)))
    return norm


def clip_coefficient_dtype(device: torch.device) -> torch.dtype:
    """float64, in which Python divides, where the device computes it."""
    return torch.float32 if device.type == "npu" else torch.float64
