"""Arguments of scaled_dot_product_attention from [sequence, batch, head, size], and its output back."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from mindspeed_lite.ops.attention import band

if TYPE_CHECKING:
    from mindspeed_lite.ops.attention.spec import AttentionSpec


class Call(NamedTuple):
    """A call of scaled_dot_product_attention.

    q, k, v: [b, heads, s, size], or with `folded` batch and heads as one axis of heads.
    mask: shows a key where it is True, or is added; [.., sq, sk]. Comes without `causal`.
    causal: from the first key on, sq == sk.
    empty: rows [b | 1, n | 1, sq, 1] that the caller's mask leaves without keys. They see every key in the kernel and
        are cleared after it, so that no kernel's own result for an empty row (0, NaN, the average) shows.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    causal: bool
    folded: bool
    empty: torch.Tensor | None

    def out(self, t: torch.Tensor, b: int) -> torch.Tensor:
        """The kernel's output as [sq, b, n, size], contiguous, empty rows 0."""
        if self.folded:
            t = t.view(b, -1, *t.shape[2:])
        t = t.permute(2, 0, 1, 3)
        if self.empty is not None:
            t = t.masked_fill(self.empty.permute(2, 0, 1, 3), 0.0)
        return t.contiguous()


def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, *, grouped: bool) -> Call:
    """`grouped`: the kernel takes fewer key heads than query heads."""
    sq, b, n, _ = q.shape
    sk, _, g, _ = v.shape
    if n != g and not grouped:
        k, v = (t.repeat_interleave(n // g, dim=2) for t in (k, v))
    square_causal = spec.causal and sq == sk and spec.mask is None
    visible, empty = (None, None) if square_causal else _mask(q, sk, spec)
    # Batch and heads as one axis of heads: the kernel then writes [s, b * n, d] in memory, which is the layout to
    # return; with a batch of its own it would write [b, s, n, d].
    folded = b > 1 and (visible is None or visible.dim() == 2 or visible.shape[:2] == (1, 1))
    q, k, v = (t.flatten(1, 2).transpose(0, 1).unsqueeze(0) if folded else t.permute(1, 2, 0, 3) for t in (q, k, v))
    return Call(q, k, v, visible, square_causal, folded, empty)


def pad(t: torch.Tensor, width: int) -> torch.Tensor:
    """Each head padded with zeros to `width`."""
    return torch.nn.functional.pad(t, (0, width - t.shape[-1])) if t.shape[-1] < width else t


def _mask(q: torch.Tensor, sk: int, spec: AttentionSpec) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The mask in PyTorch's sense, and which rows [b | 1, n | 1, sq, 1] the caller's mask leaves empty."""
    mask, positions, sq = spec.mask, spec.positions, q.shape[0]
    if mask is None:
        return None if positions is None else band.additive(sq, sk, positions, q.device, q.dtype), None
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    if positions is not None:
        mask = mask | band.hidden(sq, sk, positions, q.device)
    empty = mask.all(-1, keepdim=True)
    visible = ~mask | empty
    # Kernels want the last two dimensions written out.
    return visible.expand(visible.shape[0], visible.shape[1], sq, sk), empty.expand(-1, -1, sq, -1)
