"""npu_rotary_mul, for x in layout SBND."""

from __future__ import annotations

import torch

from . import NPU_DTYPES


def npu_rotary_mul(
    input: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    if rotary_mode not in ("half", "interleave") or rotate is not None:
        raise ValueError(f"rotary_mode {rotary_mode!r}, rotate {rotate}")
    if input.dim() != 4 or r1.dim() != 4 or r2.shape != r1.shape:
        raise ValueError(f"shapes {tuple(input.shape)}, {tuple(r1.shape)}, {tuple(r2.shape)}")
    if not input.dtype == r1.dtype == r2.dtype or input.dtype not in NPU_DTYPES:
        raise ValueError(f"dtypes {input.dtype}, {r1.dtype}, {r2.dtype}")
    s, b, n, d = input.shape
    forms = [(s, 1, 1, d)] if rotary_mode == "interleave" else [(s, 1, 1, d), (s, b, 1, d), (s, b, n, d)]
    if tuple(r1.shape) not in forms or d % 2 or not 0 < d < 896:
        raise ValueError(f"r1 {tuple(r1.shape)} for {tuple(input.shape)} in mode {rotary_mode}")
    if max(b, n) >= 1000 or (rotary_mode == "interleave" and b * n >= 1000):
        raise ValueError(f"{b} sequences of {n} heads in mode {rotary_mode}")
    if any(bool((t.abs() > 1).any()) for t in (r1, r2)):
        raise ValueError("r1 and r2 are documented for values from -1 to 1")
    x = input.float()
    if rotary_mode == "half":
        turned = torch.cat((-x[..., d // 2 :], x[..., : d // 2]), -1)
    else:
        turned = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    return (r1.float() * x + r2.float() * turned).to(input.dtype)
