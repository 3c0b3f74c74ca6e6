"""npu_swiglu and npu_gelu."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import NPU_DTYPES


def npu_swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    if input.dtype not in NPU_DTYPES or input.shape[dim] % 2:
        raise ValueError(f"{input.dtype} {tuple(input.shape)}")
    gate, up = input.float().chunk(2, dim)
    return (F.silu(gate) * up).to(input.dtype)


def npu_gelu(input: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    if input.dtype not in NPU_DTYPES or approximate not in ("none", "tanh") or input.dim() > 8:
        raise ValueError(f"{input.dtype} {tuple(input.shape)}, approximate {approximate}")
    return F.gelu(input.float(), approximate=approximate).to(input.dtype)
