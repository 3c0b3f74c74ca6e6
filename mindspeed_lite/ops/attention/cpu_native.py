"""attention on CPU in C++ (`cpu.cpp`): nothing of size sq x sk, and every product in oneDNN's micro-kernels.

It takes bf16 and fp32 on processors with AVX-512 (and uses AMX where there is one): PyTorch exports the micro-kernels,
and has none for less. Dropout is drawn from a seed by position, so that the backward pass drops the same and nothing of
it is stored; the seed comes from the default generator.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_lite.ops import native
from mindspeed_lite.ops.attention import autograd

if TYPE_CHECKING:
    from mindspeed_lite.ops.attention.spec import AttentionSpec, Case

_NO_LIMIT_LEFT, _NO_LIMIT_RIGHT = -(1 << 63), (1 << 63) - 1

_library = native.Library(
    Path(__file__).with_name("cpu.cpp"),
    {
        "forward_bf16": "pppppfppi",
        "forward_float": "pppppfppi",
        "backward_bf16": "pppppfppppppi",
        "backward_float": "pppppfppppppi",
        "probe": "ip",
    },
    uses_torch=True,
    returns_status=True,
)


# Probabilities of dropout are multiples of 2^-32, above 0 and below 1.
_DRAWS = 1 << 32


def unusable(dtype: torch.dtype) -> str | None:
    """Why a processor that has the instructions cannot run the kernel on numbers of `dtype`, or None."""
    return native.without_micro_kernel(_library, dtype)


def takes(case: Case) -> bool:
    """Whether these are tensors, and this is a processor, for the kernel; for others PyTorch's own serves."""
    if case.dtype == torch.bfloat16:
        # Pairs of numbers along a head.
        return case.head_size % 2 == 0 and case.value_size % 2 == 0 and _has_instructions()
    return case.dtype == torch.float32 and _has_instructions()


@functools.cache
def _has_instructions() -> bool:
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def drawn(spec: AttentionSpec) -> AttentionSpec:
    """With a seed, from which both halves drop the same."""
    return spec._replace(rng=int(torch.randint(1 << 62, ())))


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> autograd.Pair:
    q, k, v = _rows(q), _rows(k), _rows(v)
    (sq, b, n, _), dv = q.shape, v.shape[3]
    out = torch.empty(sq, b, n, dv, dtype=q.dtype)
    lse = torch.empty(b, n, sq)
    numbers, hidden = _describe(q, k, v, spec, ())
    run = _library.forward_bf16 if q.dtype == torch.bfloat16 else _library.forward_float
    run(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        numbers,
        hidden,
        spec.scale,
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
    spec: AttentionSpec,
) -> autograd.Triple:
    q, k, v, dout = _rows(q), _rows(k), _rows(v), _rows(dout)
    out, lse = out.contiguous(), lse.contiguous()
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype) for t in (q, k, v))
    numbers, hidden = _describe(q, k, v, spec, dout.stride()[:3])
    run = _library.backward_bf16 if q.dtype == torch.bfloat16 else _library.backward_float
    run(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        numbers,
        hidden,
        spec.scale,
        out.data_ptr(),
        lse.data_ptr(),
        dout.data_ptr(),
        dq.data_ptr(),
        dk.data_ptr(),
        dv.data_ptr(),
        torch.get_num_threads(),
    )
    return dq, dk, dv


def _rows(t: torch.Tensor) -> torch.Tensor:
    """The kernel reads a row of a head as one run of memory."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _describe(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, more: tuple[int, ...]
) -> tuple[Any, int | None]:
    """The kernel's array of numbers, and the address of the mask."""
    (sq, b, n, d), (sk, _, g, dv) = q.shape, v.shape
    left, right = spec.positions or (-1, -1)
    mask, dropped = spec.mask, 0
    strides: tuple[int, ...] = (0, 0, 0, 0)
    if mask is not None:
        strides = mask.expand(b, n, sq, sk).stride()
    if spec.rng is not None:
        dropped = min(max(round(spec.dropout_p * _DRAWS), 1), _DRAWS - 1)
    numbers = (
        *(sq, sk, b, n, g, d, dv),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        -left if left >= 0 else _NO_LIMIT_LEFT,
        right if right >= 0 else _NO_LIMIT_RIGHT,
        *strides,
        dropped,
        spec.rng or 0,
        *more,
    )
    return native.numbers(numbers), None if mask is None else mask.data_ptr()
