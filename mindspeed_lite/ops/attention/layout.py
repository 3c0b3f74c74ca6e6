"""Converts between [sequence, batch, head, size] and scaled_dot_product_attention's layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mindspeed_lite.ops.attention import band

if TYPE_CHECKING:
    from mindspeed_lite.ops.attention.spec import AttentionSpec


class Call(NamedTuple):
    """Arguments of scaled_dot_product_attention.

    q, k, v: [b, heads, s, size], or with `folded` batch and heads as one axis.
    mask: True shows a key; [.., sq, sk]. Excludes `causal`.
    causal: sq == sk.
    empty: rows [b | 1, n | 1, sq, 1] without keys by the caller's mask: they see every key in the kernel and are
    cleared
        after it, since kernels disagree on empty rows (0, NaN, the average).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    folded: bool
    empty: Tensor | None

    def out(self, t: Tensor, b: int) -> Tensor:
        """The kernel's output as [sq, b, n, size], contiguous, empty rows 0."""
        if self.folded:
            t = t.view(b, -1, *t.shape[2:])
        t = t.permute(2, 0, 1, 3)
        if self.empty is not None:
            t = t.masked_fill(self.empty.permute(2, 0, 1, 3), 0.0)
        return t.contiguous()


def call(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *, grouped: bool) -> Call:
    """`grouped`: the kernel takes grouped key heads."""
    sq, b, n, _ = q.shape
    sk, _, g, _ = v.shape
    if n != g and not grouped:
        k, v = (t.repeat_interleave(n // g, dim=2) for t in (k, v))
    square_causal = spec.causal and sq == sk and spec.mask is None
    visible, empty = (None, None) if square_causal else _mask(q, sk, spec)
    # With batch and heads folded the kernel writes [s, b * n, d], the layout to return; else [b, s, n, d].
    folded = b > 1 and (visible is None or visible.dim() == 2 or visible.shape[:2] == (1, 1))
    q, k, v = (t.flatten(1, 2).transpose(0, 1).unsqueeze(0) if folded else t.permute(1, 2, 0, 3) for t in (q, k, v))
    return Call(q, k, v, visible, square_causal, folded, empty)


def pad(t: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(t, (0, width - t.shape[-1])) if t.shape[-1] < width else t


def _mask(q: Tensor, sk: int, spec: AttentionSpec) -> tuple[Tensor | None, Tensor | None]:
    """The mask in PyTorch's sense, and the rows [b | 1, n | 1, sq, 1] without keys by the caller's mask."""
    mask, positions, sq = spec.mask, spec.positions, q.shape[0]
    if mask is None:
        return None if positions is None else ~band.hidden(sq, sk, positions, q.device), None
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    if positions is not None:
        mask = mask | band.hidden(sq, sk, positions, q.device)
    empty = mask.all(-1, keepdim=True)
    visible = ~mask | empty
    # Kernels want the last two dimensions materialised.
    return visible.expand(visible.shape[0], visible.shape[1], sq, sk), empty.expand(-1, -1, sq, -1)
