"""Reference of l2norm: norm of norms, as in Megatron."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def l2norm(tensors: Sequence[Tensor]) -> Tensor:
    dtype = torch.float64 if all(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tensors), 2, dtype=dtype)))
    return norm
