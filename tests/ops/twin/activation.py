"""npu_swiglu and npu_gelu."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def npu_swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    gate, up = input.float().chunk(2, dim)
    return (F.silu(gate) * up).to(input.dtype)


def npu_gelu(input: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    return F.gelu(input.float(), approximate=approximate).to(input.dtype)
