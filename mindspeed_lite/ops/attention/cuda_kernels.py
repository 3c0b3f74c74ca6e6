"""PyTorch's flash and memory-efficient CUDA kernels, called directly for their lse.

Both align causal order to the last key. flash takes 16 bit and one head size, a multiple of 8 up to 256 (others are
zero-padded), on compute capability 8.0 and later.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mindspeed_lite.ops.attention import band
from mindspeed_lite.ops.attention.autograd import Pair, Triple
from mindspeed_lite.ops.attention.layout import pad

if TYPE_CHECKING:
    from mindspeed_lite.ops.attention.spec import AttentionSpec, Case

_aten: Any = torch.ops.aten

# custom_mask_type of the memory-efficient kernel.
_FREE, _CAUSAL_TO_LAST_KEY = 0, 2

# lse rows are padded to multiples of this; bias rows begin at multiples of 16 bytes.
_LSE_ROWS, _BIAS_ALIGNMENT = 32, 8


class Ends(NamedTuple):
    """Cumulative lengths with a leading zero, and the longest."""

    q: Tensor
    k: Tensor
    longest_q: int
    longest_k: int

    @classmethod
    def of(cls, queries: tuple[int, ...], keys: tuple[int, ...], device: torch.device) -> Ends:
        return cls(_ends(queries, device), _ends(keys, device), max(queries), max(keys))


@functools.lru_cache(maxsize=8)
def _ends(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Cached: every layer of a model asks for the same."""
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    with torch.inference_mode(False):
        return torch.tensor(ends, dtype=torch.int32, device=device)


def why_not_flash(case: Case) -> list[str]:
    reasons, width = [], max(case.head_size, case.value_size)
    if case.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"dtype {case.dtype}: the flash kernel takes float16 and bfloat16")
    if width > 256:
        reasons.append(f"head size {width}: the flash kernel takes at most 256")
    return [*reasons, *_flash_missing()]


@functools.cache
def _flash_missing() -> tuple[str, ...]:
    if not torch.cuda.is_available():
        return ("no CUDA device",)
    if torch.version.hip is not None:
        return ("ROCm's kernel has other conventions",)
    if not torch.backends.cuda.is_flash_attention_available():
        return ("this build of PyTorch has no flash kernel",)
    if torch.cuda.get_device_capability() < (8, 0):
        return ("the flash kernel wants compute capability 8.0",)
    return ()


def flash_serves(spec: AttentionSpec) -> bool:
    return spec.mask is None and not why_not_flash(spec.case)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, ends: Ends | None = None) -> Pair:
    """q, k, v [s, b, heads, size] -> (out [sq, b, n, dv], lse [b, n, sq]); b is 1 with `ends`."""
    sq, b, n, d = q.shape
    dv = v.shape[3]
    out, lse, *_ = _aten._flash_attention_forward(
        *(_flash_layout(t, _width(d, dv), ends) for t in (q, k, v)),
        *_lengths(ends, sq, k.shape[0]),
        0.0,
        spec.causal,
        False,
        scale=spec.scale,
        **_window(spec),
    )
    return _from_flash(out, dv, ends).contiguous(), lse.reshape(b, n, sq)


def flash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spec: AttentionSpec,
    ends: Ends | None = None,
) -> Triple:
    sq, _, _, d = q.shape
    dv = v.shape[3]
    nothing = torch.empty(0, device=q.device)
    rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # unused without dropout
    dout, q, k, v, out = (_flash_layout(t, _width(d, dv), ends) for t in (dout, q, k, v, out))
    dq, dk, dv_ = _aten._flash_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        (lse if ends is None else lse.squeeze(0)).contiguous(),
        *_lengths(ends, sq, k.shape[1] if ends is None else k.shape[0]),
        0.0,
        spec.causal,
        rng_state,
        nothing,
        scale=spec.scale,
        **_window(spec),
    )
    return _from_flash(dq, d, ends), _from_flash(dk, d, ends), _from_flash(dv_, dv, ends)


def _width(d: int, dv: int) -> int:
    return -(-max(d, dv) // 8) * 8


def _flash_layout(t: Tensor, width: int, ends: Ends | None) -> Tensor:
    """[s, b, heads, size] -> [b, s, heads, width], or for a pack [s, heads, width]."""
    t = pad(t, width)
    t = t.transpose(0, 1) if ends is None else t.squeeze(1)
    return t if t.stride(-1) == 1 else t.contiguous()


def _from_flash(t: Tensor, size: int, ends: Ends | None) -> Tensor:
    t = t.transpose(0, 1) if ends is None else t.unsqueeze(1)
    return t[..., :size]


def _lengths(ends: Ends | None, sq: int, sk: int) -> tuple[Any, Any, int, int]:
    # PyTorch passes "no pack" as None, although the schema says Tensor.
    return (None, None, sq, sk) if ends is None else ends


def _window(spec: AttentionSpec) -> dict[str, int]:
    if spec.window is None:
        return {}
    return {"window_size_left": spec.window[0], "window_size_right": spec.window[1]}


def efficient_forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Pair:
    sq, _, n, _ = q.shape
    bias, empty, kind = _bias(q, k, spec)
    out, lse, *_ = _aten._efficient_attention_forward(
        *_efficient_layout(q, k, v, n), bias, None, None, None, None, 0.0, kind, True, scale=spec.scale
    )
    out, lse = out.transpose(0, 1), lse[..., :sq]
    if empty is not None:
        out = out.masked_fill(empty.permute(2, 0, 1, 3), 0.0)
        lse = lse.masked_fill(empty.squeeze(-1), float("-inf"))
    return out.contiguous(), lse.contiguous()


def efficient_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
) -> Triple:
    sq, _, n, _ = q.shape
    g = k.shape[2]
    bias, empty, kind = _bias(q, k, spec)
    if empty is not None:
        lse = lse.masked_fill(empty.squeeze(-1), float("inf"))
    lse = torch.nn.functional.pad(lse, (0, -sq % _LSE_ROWS), value=float("inf"))
    no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)
    queries, keys, values = _efficient_layout(q, k, v, n)
    dq, dk, dv, _ = _aten._efficient_attention_backward(
        dout.transpose(0, 1),
        queries,
        keys,
        values,
        bias,
        out.transpose(0, 1),
        None,
        None,
        sq,
        k.shape[0],
        lse,
        0.0,
        no_dropout,
        no_dropout,
        kind,
        False,
        scale=spec.scale,
    )
    dk, dv = (t.transpose(0, 1) if n == g else t.transpose(0, 1).unflatten(2, (g, n // g)).sum(3) for t in (dk, dv))
    return dq.transpose(0, 1), dk, dv


def _efficient_layout(q: Tensor, k: Tensor, v: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """[s, b, heads, size] -> [b, s, n, size]."""
    if k.shape[2] != n:
        k, v = (t.repeat_interleave(n // t.shape[2], dim=2) for t in (k, v))
    return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)


def _bias(q: Tensor, k: Tensor, spec: AttentionSpec) -> tuple[Tensor | None, Tensor | None, int]:
    """Bias for the scores [b, n, sq, sk], rows without keys, and the kernel's custom_mask_type.

    Rows without keys see every key here; the caller clears them.
    """
    mask, positions = spec.mask, spec.positions
    if mask is None:
        assert spec.window is None
        return None, None, _CAUSAL_TO_LAST_KEY if spec.causal else _FREE
    (sq, b, n, _), sk = q.shape, k.shape[0]
    whole = -(-sk // _BIAS_ALIGNMENT) * _BIAS_ALIGNMENT
    hidden = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    if positions is not None:
        hidden = hidden | band.hidden(sq, sk, positions, q.device)
    empty = hidden.all(-1, keepdim=True)
    hidden = hidden & ~empty
    empty = empty.expand(-1, -1, sq, -1)
    bias = torch.zeros(*hidden.shape[:2], sq, whole, dtype=q.dtype, device=q.device)[..., :sk]
    bias = bias.masked_fill_(hidden, float("-inf"))
    return bias.expand(b, n, sq, sk), empty, _FREE
