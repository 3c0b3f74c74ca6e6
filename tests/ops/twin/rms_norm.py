"""npu_rms_norm."""

from __future__ import annotations

import torch


def npu_rms_norm(input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    wide = input.float()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(input.dtype), rstd
