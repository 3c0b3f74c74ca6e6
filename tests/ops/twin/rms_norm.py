"""npu_rms_norm, npu_add_rms_norm and npu_rms_norm_backward."""

from __future__ import annotations

import torch

from . import NPU_DTYPES


def npu_rms_norm(input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    _check(input, gamma)
    wide = input.float()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(input.dtype), rstd


@torch.no_grad()  # it has no autograd formula
def npu_add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if x1.shape != x2.shape or x1.dtype != x2.dtype:
        raise ValueError(f"x1 {x1.dtype} {tuple(x1.shape)} and x2 {x2.dtype} {tuple(x2.shape)}")
    x = x1 + x2
    y, rstd = npu_rms_norm(x, gamma, epsilon)
    return y, rstd, x


@torch.no_grad()
def npu_rms_norm_backward(
    dy: torch.Tensor, input: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(input, gamma)
    if dy.shape != input.shape or dy.dtype != input.dtype:
        raise ValueError(f"dy {dy.dtype} {tuple(dy.shape)} for input {input.dtype} {tuple(input.shape)}")
    if rstd.dtype != torch.float32 or rstd.shape != (*input.shape[:-1], 1):
        raise ValueError(f"rstd {rstd.dtype} {tuple(rstd.shape)}")
    normal, grad = input.float() * rstd, dy.float()
    scaled = grad * gamma.float()
    dx = (scaled - normal * (scaled * normal).mean(-1, keepdim=True)) * rstd
    return dx.to(input.dtype), (grad * normal).flatten(0, -2).sum(0)  # dgamma is fp32


def _check(input: torch.Tensor, gamma: torch.Tensor) -> None:
    if input.dtype not in NPU_DTYPES or gamma.dtype != input.dtype:
        raise ValueError(f"dtypes {input.dtype} and {gamma.dtype}")
    if not 2 <= input.dim() <= 8:
        raise ValueError(f"{input.dim()} dimensions")
    if gamma.shape != input.shape[-gamma.dim() :]:
        raise ValueError(f"gamma {tuple(gamma.shape)} for input {tuple(input.shape)}")
