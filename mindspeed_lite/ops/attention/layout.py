"""From [sequence, batch, head, size] to the [batch, head, sequence, size] of PyTorch's kernels, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from mindspeed_lite.ops.attention import band

if TYPE_CHECKING:
    from mindspeed_lite.ops.attention.spec import AttentionSpec


class Call(NamedTuple):
    """What a kernel of the kind of PyTorch's scaled_dot_product_attention is called with.

    q, k, v: [b, heads, s, size], or with `folded` batch and heads as one axis of heads.
    mask: shows a key where it is True, or is added; [.., sq, sk]. Comes without `causal`.
    causal: from the first key on, sq == sk.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    causal: bool
    folded: bool
    # Rows [b | 1, n | 1, sq, 1] that the caller's mask leaves without keys. They see every key in the kernel and
    # are cleared behind it, so that no kernel's own idea of an empty row (0, NaN, the average) shows.
    empty: torch.Tensor | None

    def rows(self, t: torch.Tensor) -> torch.Tensor:
        """[s, b, n, size] as q stands here."""
        return _to_kernel(t, self.folded)

    def out(self, t: torch.Tensor, b: int, size: int) -> torch.Tensor:
        """The kernel's output as [sq, b, n, size], contiguous, empty rows 0."""
        t = self.gradient(t, b, size)
        if self.empty is not None:
            t = t.masked_fill(self.empty.permute(2, 0, 1, 3), 0.0)
        return t.contiguous()

    def gradient(self, t: torch.Tensor, b: int, size: int) -> torch.Tensor:
        """[.., heads, s, padded size] as [s, b, heads, size]."""
        if self.folded:
            t = t.view(b, -1, *t.shape[2:])
        t = t.permute(2, 0, 1, 3)
        return t[..., :size] if t.shape[3] > size else t

    def lse(self, lse: torch.Tensor, b: int) -> torch.Tensor:
        """The kernel's log-sum-exp as [b, n, sq], empty rows -inf."""
        lse = lse.reshape(b, -1, lse.shape[2]) if self.folded else lse
        return lse if self.empty is None else lse.masked_fill(self.empty.squeeze(-1), float("-inf"))

    def given_lse(self, lse: torch.Tensor) -> torch.Tensor:
        """[b, n, sq] as the kernel's backward wants it: +inf, and so p = 0, in rows without keys."""
        if self.empty is not None:
            lse = lse.masked_fill(self.empty.squeeze(-1), float("inf"))
        return lse.flatten(0, 1).unsqueeze(0) if self.folded else lse


def call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    *,
    grouped: bool,
    padded: bool,
    mask_dtype: torch.dtype | None = None,
) -> Call:
    """`grouped`: the kernel takes fewer key heads than query heads. `padded`: it takes one head size only.

    `mask_dtype` is that of the additive mask of a band (q's unless given).
    """
    sq, b, n, d = q.shape
    sk, _, g, dv = v.shape
    if padded and d != dv:
        # Zeros in q and k leave the scores alone; zeros in v only add columns that are cut off again.
        width = max(d, dv)
        q, k, v = (pad(t, width) for t in (q, k, v))
    if n != g and not grouped:
        k, v = (t.repeat_interleave(n // g, dim=2) for t in (k, v))
    square_causal = spec.causal and sq == sk and spec.mask is None
    visible, empty = (None, None) if square_causal else _mask(q, sk, spec, mask_dtype)
    # Batch and heads as one axis of heads: the kernel then writes [s, b * n, d] in memory, which is the layout to
    # return; with a batch of its own it would write [b, s, n, d]. (Key head i still serves its n / g query heads:
    # both axes grow by the same b.)
    folded = b > 1 and (visible is None or visible.dim() == 2 or visible.shape[:2] == (1, 1))
    q, k, v = (_to_kernel(t, folded) for t in (q, k, v))
    return Call(q, k, v, visible, square_causal, folded, empty)


def _to_kernel(t: torch.Tensor, folded: bool) -> torch.Tensor:
    return t.flatten(1, 2).transpose(0, 1).unsqueeze(0) if folded else t.permute(1, 2, 0, 3)


def pad(t: torch.Tensor, width: int) -> torch.Tensor:
    """Zeros behind each head up to `width`."""
    return torch.nn.functional.pad(t, (0, width - t.shape[-1])) if t.shape[-1] < width else t


def _mask(
    q: torch.Tensor, sk: int, spec: AttentionSpec, mask_dtype: torch.dtype | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The mask in PyTorch's sense, and which rows [b | 1, n | 1, sq, 1] the caller's mask leaves empty."""
    mask, positions, sq = spec.mask, spec.positions, q.shape[0]
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
