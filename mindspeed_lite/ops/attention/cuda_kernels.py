"""PyTorch's flash and cuDNN kernels, called directly for their lse.

Flash aligns causal order to the last key, and takes 16 bit and one head size, a multiple of 8 up to 256 (others are
zero-padded), on compute capability 8.0 and later. cuDNN takes up to 128, and neither windows nor packs.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed_lite.ops.attention import cuda_flash
from mindspeed_lite.ops.attention.autograd import Pair, Triple, pad
from mindspeed_lite.ops.attention.spec import AttentionSpec, Case
from mindspeed_lite.ops.streams import stream_id

_aten: Any = torch.ops.aten


class Ends(NamedTuple):
    """Cumulative lengths with a leading zero, and the longest."""

    q: Tensor
    k: Tensor
    longest_q: int
    longest_k: int

    @classmethod
    def of(cls, queries: tuple[int, ...], keys: tuple[int, ...], device: torch.device) -> Ends:
        stream = stream_id(device)
        return cls(_ends(queries, device, stream), _ends(keys, device, stream), max(queries), max(keys))


@functools.lru_cache(maxsize=8)
def _ends(lengths: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
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


def takes_cudnn(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> bool:
    """Whether cuDNN serves a call that flash serves, and is to be preferred."""
    sq, sk = q.shape[0], k.shape[0]
    if spec.window is not None or (spec.causal and sq != sk) or _width(q.shape[3], v.shape[3]) > 128:
        return False
    # Called directly, cuDNN asks for neither of these.
    cudnn: Any = torch.backends.cudnn
    if torch.are_deterministic_algorithms_enabled() or not cudnn.is_available():
        return False
    return cuda_flash.takes_cudnn(masked=False, queries=sq, keys=sk)


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Pair:
    sq, b, n, d = q.shape
    dv = v.shape[3]
    inputs = (_cudnn_layout(t, _width(d, dv)) for t in (q, k, v))
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
        *inputs, None, True, 0.0, spec.causal, False, scale=spec.scale
    )
    return _from_cudnn(out, dv).contiguous(), lse.reshape(b, n, sq)


def cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
) -> Triple:
    (sq, _, _, d), (sk, _, _, dv) = q.shape, v.shape
    dout, q, k, v, out = (_cudnn_layout(t, _width(d, dv)) for t in (dout, q, k, v, out))
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # state of dropout
    # Absent tensors are None, as in `_lengths`.
    dq, dk, dv_ = _aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse.unsqueeze(-1).contiguous(), unused, unused, None, None, None, sq, sk, 0.0, spec.causal,
        scale=spec.scale,
    )  # fmt: skip
    return _from_cudnn(dq, d), _from_cudnn(dk, d), _from_cudnn(dv_, dv)


def _cudnn_layout(t: Tensor, width: int) -> Tensor:
    """[s, b, heads, size] -> [b, heads, s, width]."""
    t = pad(t, width)
    return (t if t.stride(-1) == 1 else t.contiguous()).permute(1, 2, 0, 3)


def _from_cudnn(t: Tensor, size: int) -> Tensor:
    return t.permute(2, 0, 1, 3)[..., :size]


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
