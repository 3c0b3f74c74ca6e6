"""attention through a kernel of the kind of PyTorch's scaled_dot_product_attention, for CPU and CUDA."""

from __future__ import annotations

from typing import Protocol

import torch

from mindspeed_lite.ops.attention import band


class Kernel(Protocol):
    """softmax(scale * q k^T + mask) v over [b, heads, s, size]; a bool mask shows a key where it is True.

    `causal` starts at the first key and comes without a mask. Key heads may be fewer than query heads.
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float,
        dropout_p: float,
    ) -> torch.Tensor: ...


def torch_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
) -> torch.Tensor:
    """PyTorch's own choice among its kernels."""
    return torch.nn.functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def attention(
    kernel: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float | None,
    dropout_p: float,
    window: band.Window | None,
    grouped: bool,
    padded: bool,
    mask_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`grouped`: the kernel takes fewer key heads than query heads. `padded`: it takes one head size only.

    `mask_dtype` is that of the additive mask of a band (q's unless given). The band comes in canonical form.
    """
    sq, b, n, d = q.shape
    sk, _, g, dv = v.shape
    scale = d**-0.5 if scale is None else scale
    if padded and d != dv:
        # Zeros in q and k leave the scores alone; zeros in v only add columns that are cut off again.
        width = max(d, dv)
        q, k, v = (_pad(t, width) for t in (q, k, v))
    if n != g and not grouped:
        k, v = (t.repeat_interleave(n // g, dim=2) for t in (k, v))

    square_causal = causal and sq == sk and mask is None
    visible, empty = (None, None) if square_causal else _mask(q, sk, causal, mask, window, mask_dtype)
    fold = b > 1 and (visible is None or visible.dim() == 2 or visible.shape[:2] == (1, 1))
    if fold:
        # Batch and heads as one axis of heads: the kernel then writes [s, b * n, d] in memory, which is the
        # layout to return; with a batch of its own it would write [b, s, n, d]. (Key head i still serves its
        # n / g query heads: both axes grow by the same b.)
        q, k, v = (t.reshape(t.shape[0], -1, t.shape[3]).transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    else:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # [b, heads, s, d]
    out = kernel(q, k, v, visible, square_causal, scale, dropout_p)
    out = out[0].transpose(0, 1).reshape(sq, b, n, -1) if fold else out.permute(2, 0, 1, 3)  # [sq, b, n, size]
    if out.shape[3] != dv:
        out = out[..., :dv]
    if empty is not None:
        # [b | 1, n | 1, sq, 1] -> [sq, b | 1, n | 1, 1]
        out = out.masked_fill(empty.permute(2, 0, 1, 3), 0.0)
    return out.contiguous()


def _pad(t: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(t, (0, width - t.shape[-1])) if t.shape[-1] < width else t


def _mask(
    q: torch.Tensor,
    sk: int,
    causal: bool,
    mask: torch.Tensor | None,
    window: band.Window | None,
    mask_dtype: torch.dtype | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The mask in PyTorch's sense, and which rows [b | 1, n | 1, sq, 1] the caller's mask leaves empty.

    Those rows see every key in the kernel and are cleared behind it, so that no kernel's own idea of an empty
    row (0, NaN, the average) shows, forward or backward.
    """
    positions = band.limits(causal, window)
    sq = q.shape[0]
    if mask is None:
        if positions is None:
            return None, None
        return band.additive(sq, sk, positions, q.device, mask_dtype or q.dtype), None
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    if positions is not None:
        mask = mask | band.hidden(sq, sk, positions, q.device)
    empty = mask.all(-1, keepdim=True)
    visible = ~mask | empty
    # Kernels want the last two dimensions written out.
    return visible.expand(visible.shape[0], visible.shape[1], sq, sk), empty.expand(-1, -1, sq, -1)
