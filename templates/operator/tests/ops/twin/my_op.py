"""npu_fast_gelu."""

from __future__ import annotations

import torch

from . import NPU_DTYPES


def npu_fast_gelu(input: torch.Tensor) -> torch.Tensor:
    if input.dtype not in NPU_DTYPES or not 1 <= input.dim() <= 8:
        raise ValueError(f"{input.dtype} {tuple(input.shape)}")
    wide = input.float()
    return (wide * torch.sigmoid(1.702 * wide)).to(input.dtype)
