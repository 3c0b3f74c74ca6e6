"""Checked, canonical arguments of an attention call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed_lite.ops.attention import band

_FLOAT = torch.finfo(torch.float32)


class Case(NamedTuple):
    """Call properties that select a backend."""

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


class AttentionSpec(NamedTuple):
    """Immutable options of a call, made by `prepare`.

    A NamedTuple is created six times faster than a dataclass.

    causal, window: canonical band (see `band`); exclusive.
    mask: bool, True hides the key, broadcastable to [b, n or 1, sq, sk].
    scale: above 0 and finite in fp32.
    sink: [n], or None.
    degenerate: a tensor without elements, or queries without a key by position. Kernels differ; the reference serves.
    rng: dropout state of a backend for its backward pass; None until drawn.
    """

    case: Case
    causal: bool
    window: band.Window | None
    mask: Tensor | None
    scale: float
    dropout_p: float
    sink: Tensor | None
    degenerate: bool
    rng: Any = None

    @property
    def positions(self) -> band.Window | None:
        """The band as a window, causal included; None if all keys are visible by position."""
        return band.CAUSAL if self.causal else self.window

    def hidden(self, sq: int, sk: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Keys hidden by mask and band [b | 1, n | 1, sq | 1, sk], and the rows without keys [b | 1, n | 1, sq, 1].

        Those rows see every key: kernels disagree on them (0, NaN, the average), so the caller clears them.
        """
        hidden, positions = self.mask, self.positions
        if positions is not None:
            by_position = band.hidden(sq, sk, positions, device)
            hidden = by_position if hidden is None else hidden | by_position
        assert hidden is not None
        hidden = hidden.reshape((1,) * (4 - hidden.dim()) + tuple(hidden.shape))
        empty = hidden.all(-1, keepdim=True)
        return hidden & ~empty, empty.expand(-1, -1, sq, -1)

    def for_lengths(self, sq: int, sk: int) -> AttentionSpec:
        """The same for other lengths."""
        causal, window = band.canonical(self.causal, self.window, sq, sk)
        return self._replace(
            case=self.case._replace(causal=causal, window=window is not None),
            causal=causal,
            window=window,
            degenerate=_is_degenerate(self.case, sq, sk, causal, window),
        )


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    window: band.Window | None = None,
    sink: Tensor | None = None,
) -> AttentionSpec:
    """Checks the arguments of `attention`.

    causal: the last query is aligned with the last key (bottom right).
    window: (left, right): visible keys before and after the query's own; -1 is no limit.
    mask: bool, True hides the key, broadcastable to [b, n or 1, sq, sk]; combined with the other two.
    scale: default 1 / sqrt(d); above 0 and finite in fp32.
    dropout_p: drawn from the device's default generator; the pattern depends on the backend.
    sink: [n], any floating dtype, one logit per head without a value (Megatron's softmax offset). Differentiable.

    Raises:
        ValueError: the tensors do not fit each other, or a value is out of range.
    """
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
    if scale is None:
        # Zero-size heads: every score is 0.
        scale = d**-0.5 if d else 1.0
    elif not _FLOAT.tiny <= scale <= _FLOAT.max:
        # Kernels multiply -inf scores by it.
        raise ValueError(f"attention: scale must be above 0 and finite in fp32, not {scale}")
    if mask is not None:
        _check_mask(mask, (b, n, sq, sk))
    if sink is not None and sink.shape != (n,):
        raise ValueError(f"attention: sink {tuple(sink.shape)} must hold one number for each of {n} heads")
    causal, window = band.canonical(causal, window, sq, sk)
    sizes, options = (n, g, d, dv), (causal, window is not None, mask is not None, dropout_p > 0, sink is not None)
    case = Case(q.device.type, dtype, *sizes, *options)
    degenerate = b == 0 or _is_degenerate(case, sq, sk, causal, window)
    return AttentionSpec(case, causal, window, mask, scale, dropout_p, sink, degenerate)


def _is_degenerate(case: Case, sq: int, sk: int, causal: bool, window: band.Window | None) -> bool:
    is_empty = 0 in (sq, sk, case.heads, case.head_size, case.value_size)
    return is_empty or band.has_rows_without_keys(causal, window, sq, sk)


def _check_mask(mask: Tensor, wanted: tuple[int, int, int, int]) -> None:
    if mask.dtype != torch.bool:
        raise ValueError(f"attention: mask must be bool (True hides the key), not {mask.dtype}")
    sizes = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if len(sizes) != 4 or any(have not in (1, want) for have, want in zip(sizes, wanted, strict=True)):
        raise ValueError(f"attention: mask {tuple(mask.shape)} does not broadcast to {wanted}")
