"""Softmax attention in the layout [sequence, batch, head, head size], for a transformer's attention core."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mindspeed_lite.ops.attention import band, reference
from mindspeed_lite.ops.dispatch import Operator

__all__ = ["OPERATOR", "Case", "attention", "why_not"]


class Case(NamedTuple):
    """What decides which backend can serve a call."""

    device: str
    dtype: torch.dtype
    heads: int
    groups: int
    head_size: int
    value_size: int
    causal: bool
    window: bool
    mask: bool
    dropout: bool
    empty_rows: bool


OPERATOR = Operator(
    "attention",
    reference.attention,
    {
        "cpu": "mindspeed_lite.ops.attention.cpu",
        "cuda": "mindspeed_lite.ops.attention.cuda",
        "npu": "mindspeed_lite.ops.attention.npu",
    },
)


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
    """out[s, b, i] = sum_t dropout(softmax_t(scale * q[s, b, i] . k[t, b, j])) * v[t, b, j], j = i * g // n

    q: [sq, b, n, d], k: [sk, b, g, d], v: [sk, b, g, dv], one dtype, any strides; g divides n, so that each
    key head serves n / g consecutive query heads. Returns [sq, b, n, dv], contiguous, in q's dtype.

    causal: a query sees no later key. With sq != sk the last query stands at the last key (bottom right
        corner), as in Megatron's sliding-window mask and as a key cache needs it; Megatron's own causal mask
        knows sq == sk only, where the two agree, and none at all for sq == 1, which is the same again.
    window: (left, right) as Megatron's window_size: `left` keys before the query's own and `right` after it;
        -1 is no limit. Combined with `causal` if both are given.
    mask: bool, True hides the key (Megatron's convention), broadcastable to [b, n or 1, sq, sk]; combined
        with the other two.
    scale: 1 / sqrt(d) unless given.
    dropout_p: drawn from the device's current default generator; fork it outside if ranks must differ.

    A row with at least one visible key agrees with Megatron's local path (which adds -10000 instead of -inf
    to hidden scores, the same once rounded). A row with none returns 0 and gives no gradient; Megatron
    averages all values there. Such rows are padding, and nothing may depend on them.

    Fast backends keep q, k, v, the output and one number per row and head for the backward pass, and build
    nothing of size sq x sk except for a window (one mask, shared by all calls) or a mask given by the caller.
    Scores and softmax are fp32 there; the reference is fp32 throughout (float64 for float64).
    """
    case, causal, window = _prepare(q, k, v, causal, mask, dropout_p, window)
    # Kernels differ on what they accept of empty tensors, and there is nothing to win.
    implementation = reference.attention if 0 in q.shape or 0 in v.shape else OPERATOR.choose(case)
    return implementation(q, k, v, causal=causal, mask=mask, scale=scale, dropout_p=dropout_p, window=window)


def why_not(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    window: band.Window | None = None,
) -> list[str]:
    """Every reason why this call would run on the reference, not on its device's backend; empty if none."""
    return OPERATOR.why_not(_prepare(q, k, v, causal, mask, dropout_p, window)[0])


def _prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    mask: torch.Tensor | None,
    dropout_p: float,
    window: band.Window | None,
) -> tuple[Case, bool, band.Window | None]:
    """The case of a call whose arguments fit each other, and its band in the only spelling backends know."""
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError("attention: q, k and v must be [sequence, batch, head, head size]")
    sq, b, n, d = q.shape
    sk, kb, g, kd = k.shape
    vk, vb, vg, dv = v.shape
    if kb != b or vb != b or kd != d or vk != sk or vg != g or g == 0 or n % g:
        raise ValueError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit together: "
            "want [sq, b, n, d], [sk, b, g, d] and [sk, b, g, dv] with g dividing n"
        )
    dtype = q.dtype
    if k.dtype != dtype or v.dtype != dtype:
        raise ValueError(f"attention: q, k and v must have one dtype, not {dtype}, {k.dtype} and {v.dtype}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"attention: dropout_p must be in [0, 1), not {dropout_p}")
    if mask is not None:
        _check_mask(mask, (b, n, sq, sk))
    empty_rows = False
    if causal or window is not None:
        causal, window = band.canonical(causal, window, sq, sk)
        empty_rows = sq > sk and band.leaves_rows_without_keys(causal, window, sq, sk)
    case = Case(
        q.device.type,
        dtype,
        n,
        g,
        d,
        dv,
        causal,
        window is not None,
        mask is not None,
        dropout_p > 0,
        empty_rows,
    )
    return case, causal, window


def _check_mask(mask: torch.Tensor, wanted: tuple[int, int, int, int]) -> None:
    if mask.dtype != torch.bool:
        raise ValueError(f"attention: mask must be bool (True hides the key), not {mask.dtype}")
    sizes = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if len(sizes) != 4 or any(have not in (1, want) for have, want in zip(sizes, wanted, strict=True)):
        raise ValueError(f"attention: mask {tuple(mask.shape)} does not broadcast to {wanted}")
