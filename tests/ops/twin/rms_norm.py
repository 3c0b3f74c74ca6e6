"""npu_rms_norm."""

from __future__ import annotations

import torch

from . import NPU_DTYPES


def npu_rms_norm(input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    _check(input, gamma)
    wide = input.float()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(input.dtype), rstd


def _check(input: torch.Tensor, gamma: torch.Tensor) -> None:
    if input.dtype not in NPU_DTYPES or gamma.dtype != input.dtype:
        raise ValueError(f"dtypes {input.dtype} and {gamma.dtype}")
    if not 2 <= input.dim() <= 8:
        raise ValueError(f"{input.dim()} dimensions")
    if gamma.shape != input.shape[-gamma.dim() :]:
        raise ValueError(f"gamma {tuple(gamma.shape)} for input {tuple(input.shape)}")
