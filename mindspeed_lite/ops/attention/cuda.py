"""attention on CUDA through PyTorch's fused kernels (flash, memory-efficient, cuDNN: PyTorch chooses)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mindspeed_lite.ops.attention import _sdpa, band

if TYPE_CHECKING:
    from mindspeed_lite.ops.attention import Case


def supported(case: Case) -> list[str]:
    reasons = []
    if case.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        reasons.append(f"dtype {case.dtype}: PyTorch's fused CUDA kernels take float16, bfloat16 and float32")
    if case.empty_rows:
        reasons.append("a causal band with more queries than keys leaves rows without keys")
    return reasons


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    window: band.Window | None = None,
) -> torch.Tensor:
    d, dv = q.shape[3], v.shape[3]
    # Only the flash kernel takes grouped key heads: 16 bit, one head size of at most 256, and no mask. For
    # the others PyTorch would take the path that writes the scores out, so the key heads are repeated.
    masked = mask is not None or window is not None or (causal and q.shape[0] != k.shape[0])
    grouped = not masked and d == dv <= 256 and q.dtype in (torch.float16, torch.bfloat16)
    return _sdpa.attention(
        _sdpa.torch_kernel,
        q,
        k,
        v,
        causal=causal,
        mask=mask,
        scale=scale,
        dropout_p=dropout_p,
        window=window,
        grouped=grouped,
        padded=False,
    )
