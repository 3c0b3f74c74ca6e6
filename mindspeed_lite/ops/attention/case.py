"""Which backend serves a call of attention, and the one spelling of its arguments that backends know."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch

from mindspeed_lite.ops.attention import band, reference
from mindspeed_lite.ops.dispatch import Operator


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
    sink: bool


OPERATOR = Operator(
    "attention",
    reference.attention,  # type: ignore[arg-type]  # a pair on request
    {
        "cpu": "mindspeed_lite.ops.attention.cpu",
        "cuda": "mindspeed_lite.ops.attention.cuda",
        "npu": "mindspeed_lite.ops.attention.npu",
    },
)


def module(q: torch.Tensor, v: torch.Tensor, case: Case) -> Any:
    """The module that serves a case: that of the implementation chosen for `attention`."""
    return reference if 0 in q.shape or 0 in v.shape else sys.modules[OPERATOR.choose(case).__module__]


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float | None,
    dropout_p: float,
    window: band.Window | None,
    sink: torch.Tensor | None,
) -> tuple[Case, bool, band.Window | None, float]:
    """The case of a call whose arguments fit each other, its band in the only spelling backends know, its scale."""
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
    if sink is not None and sink.shape != (n,):
        raise ValueError(f"attention: sink {tuple(sink.shape)} must hold one number for each of {n} heads")
    if causal or window is not None:
        causal, window = band.canonical(causal, window, sq, sk)
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
        sink is not None,
    )
    return case, causal, window, d**-0.5 if scale is None else scale


def _check_mask(mask: torch.Tensor, wanted: tuple[int, int, int, int]) -> None:
    if mask.dtype != torch.bool:
        raise ValueError(f"attention: mask must be bool (True hides the key), not {mask.dtype}")
    sizes = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if len(sizes) != 4 or any(have not in (1, want) for have, want in zip(sizes, wanted, strict=True)):
        raise ValueError(f"attention: mask {tuple(mask.shape)} does not broadcast to {wanted}")
