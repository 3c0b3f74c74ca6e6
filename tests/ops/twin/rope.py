"""npu_rotary_mul, for x in layout SBND."""

from __future__ import annotations

import torch


def npu_rotary_mul(
    input: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    if any(bool((t.abs() > 1).any()) for t in (r1, r2)):
        raise ValueError("r1 and r2 are documented for values from -1 to 1")
    x, d = input.float(), input.shape[-1]
    if rotary_mode == "half":
        turned = torch.cat((-x[..., d // 2 :], x[..., : d // 2]), -1)
    else:
        turned = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    return (r1.float() * x + r2.float() * turned).to(input.dtype)
