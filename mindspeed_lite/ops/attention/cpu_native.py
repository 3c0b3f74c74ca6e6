"""attention on CPU in C++ (`cpu.cpp`): nothing of size sq x sk, and every product in oneDNN's micro-kernels.

It takes bf16 and fp32 on processors with AVX-512 (and uses AMX where there is one): PyTorch exports the micro-kernels,
and has none for less. Dropout is drawn from a seed by position, so that the backward pass drops the same and nothing of
it is stored; the seed comes from the default generator.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

from mindspeed_lite.ops import native
from mindspeed_lite.ops.attention import autograd, band

_NO_LIMIT_LEFT, _NO_LIMIT_RIGHT = -(1 << 63), (1 << 63) - 1

_library = native.Library(
    Path(__file__).with_name("cpu.cpp"),
    {
        "forward_bf16": "pppppfppi",
        "forward_float": "pppppfppi",
        "backward_bf16": "pppppfppppppi",
        "backward_float": "pppppfppppppi",
    },
    uses_torch=True,
)


@functools.cache
def unusable() -> str | None:
    """Why a processor that has the instructions cannot run the kernel, or None."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this PyTorch is built without oneDNN"
    return _library.unusable()


def takes(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether these are tensors, and this is a processor, for the kernel; for others PyTorch's own serves."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    if q.dtype == torch.bfloat16:
        # Pairs of numbers along a head.
        return q.shape[3] % 2 == 0 and v.shape[3] % 2 == 0
    return q.dtype == torch.float32


def kernels(dropout_p: float) -> autograd.Kernels:
    """The two halves, with one draw of dropout for both."""
    if dropout_p == 0.0:
        return _KERNELS
    seed = int(torch.randint(1 << 62, ()))
    how: dict[str, Any] = {"dropped": round(dropout_p * 2**32), "seed": seed}
    return autograd.Kernels(functools.partial(forward, **how), functools.partial(backward, **how))


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
    window: band.Window | None,
    dropped: int = 0,
    seed: int = 0,
) -> autograd.Pair:
    q, k, v = (_rows(t) for t in (q, k, v))
    (sq, b, n, _), dv = q.shape, v.shape[3]
    out = torch.empty(sq, b, n, dv, dtype=q.dtype)
    lse = torch.empty(b, n, sq)
    numbers, hidden = _describe(q, k, v, causal, mask, window, dropped, seed, ())
    run = _library.forward_bf16 if q.dtype == torch.bfloat16 else _library.forward_float
    run(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        numbers,
        hidden,
        scale,
        out.data_ptr(),
        lse.data_ptr(),
        torch.get_num_threads(),
    )
    return out, lse


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
    window: band.Window | None,
    dropped: int = 0,
    seed: int = 0,
) -> autograd.Triple:
    q, k, v, dout = (_rows(t) for t in (q, k, v, dout))
    out, lse = out.contiguous(), lse.contiguous()
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype) for t in (q, k, v))
    numbers, hidden = _describe(q, k, v, causal, mask, window, dropped, seed, dout.stride()[:3])
    run = _library.backward_bf16 if q.dtype == torch.bfloat16 else _library.backward_float
    run(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        numbers,
        hidden,
        scale,
        out.data_ptr(),
        lse.data_ptr(),
        dout.data_ptr(),
        dq.data_ptr(),
        dk.data_ptr(),
        dv.data_ptr(),
        torch.get_num_threads(),
    )
    return dq, dk, dv


_KERNELS = autograd.Kernels(forward, backward)


def _rows(t: torch.Tensor) -> torch.Tensor:
    """The kernel reads a row of a head as one run of memory."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _describe(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    mask: torch.Tensor | None,
    window: band.Window | None,
    dropped: int,
    seed: int,
    more: tuple[int, ...],
) -> tuple[Any, int | None]:
    """The kernel's array of numbers, and the address of the mask."""
    (sq, b, n, d), (sk, _, g, dv) = q.shape, v.shape
    left, right = band.limits(causal, window) or (-1, -1)
    strides: tuple[int, ...] = (0, 0, 0, 0)
    if mask is not None:
        strides = mask.expand(b, n, sq, sk).stride()
    numbers = (
        *(sq, sk, b, n, g, d, dv),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        -left if left >= 0 else _NO_LIMIT_LEFT,
        right if right >= 0 else _NO_LIMIT_RIGHT,
        *strides,
        dropped,
        seed,
        *more,
    )
    return (ctypes.c_int64 * len(numbers))(*numbers), None if mask is None else mask.data_ptr()
