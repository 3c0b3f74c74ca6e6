"""attention on CPU in C++ for bf16 and fp32 with AVX2, else one block of rows at a time.

AVX-512 BF16 and AMX multiply bf16 directly; elsewhere inputs are widened to fp32 once. Dropout is a function of seed
and position. Results do not depend on the number of threads.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from mindspeed_lite.ops import dispatch, native, traced
from mindspeed_lite.ops.attention import autograd, blocked, reference
from mindspeed_lite.ops.attention.spec import AttentionSpec

_NO_LIMIT_LEFT, _NO_LIMIT_RIGHT = -(1 << 63), (1 << 63) - 1

_library = native.Library(__file__, uses_torch=True)

# Dropout probabilities are multiples of 2^-32 in (0, 1).
_DRAWS = 1 << 32

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def unusable() -> str | None:
    """Why this machine cannot run the C++ kernel now, or None."""
    return native.without_micro_kernel(_library, torch.float32)


def attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    if torch.compiler.is_compiling():
        return reference.attention(q, k, v, spec)
    if spec.dropout_p > 0.0:
        in_kernel = _in_kernel(q, spec)
        spec = spec._replace(rng=int(torch.randint(1 << 62, ()))) if in_kernel else blocked.drawn(q, k, spec)
    return autograd.attention(_KERNELS, q, k, v, spec)


@traced.observed
def forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *, wide: bool = False) -> autograd.Pair:
    """Output and log-sum-exp; wide: the output is unrounded fp32."""
    if not _in_kernel(q, spec):
        return blocked.forward(q, k, v, spec)
    q, k, v = _rows(q), _rows(k), _rows(v)
    (sq, b, n, _), dv = q.shape, v.shape[3]
    out = torch.empty(sq, b, n, dv, dtype=torch.float32 if wide else q.dtype)
    lse = torch.empty(b, n, sq)
    sizes, hidden = _describe(q, k, v, spec, (0, 0, 0))
    kernel = getattr(_library, f"forward_{_numbers_of(q, dv)}")
    kernel(q, k, v, sizes, hidden, spec.scale, out, lse, wide, torch.get_num_threads())
    return out, lse


@traced.observed
def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec, *, wide: bool = False
) -> autograd.Triple:
    """Gradients of q, k and v; wide: unrounded fp32."""
    if not _in_kernel(q, spec):
        return blocked.backward(dout, q, k, v, out, lse, spec)
    q, k, v, dout = _rows(q), _rows(k), _rows(v), _rows(dout)
    out, lse = out.contiguous(), lse.contiguous()
    dq, dk, dv = (torch.empty(t.shape, dtype=torch.float32 if wide else t.dtype) for t in (q, k, v))
    sizes, hidden = _describe(q, k, v, spec, dout.stride()[:3])
    kernel = getattr(_library, f"backward_{_numbers_of(q, v.shape[3])}")
    given = (q, k, v, sizes, hidden, spec.scale, out, lse, dout, dq, dk, dv)
    kernel(*given, wide, torch.get_num_threads())
    return dq, dk, dv


_KERNELS = autograd.Kernels(forward, backward)
UNROUNDED = autograd.Kernels(functools.partial(forward, wide=True), functools.partial(backward, wide=True))


def _in_kernel(q: Tensor, spec: AttentionSpec) -> bool:
    """True if the C++ kernel takes the call; logs once why it cannot run here."""
    # Dropout state is specific to the implementation.
    if q.dtype not in native.DTYPES or traced.is_traced(q) or not (spec.rng is None or isinstance(spec.rng, int)):
        return False
    reason = unusable()
    if reason is None:
        return True
    if spec.rng is not None:
        raise RuntimeError(f"attention: the kernel that drew a call's dropout can no longer be used: {reason}")
    dispatch.report_fallback("attention", "cpu", (reason,), to="PyTorch, a block of rows at a time")
    return False


def _rows(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _numbers_of(q: Tensor, dv: int) -> str:
    """Kernel-name suffix: input dtype and multiply dtype."""
    if q.dtype == torch.float32:
        return "float"
    # The bf16 micro-kernels take pairs along a head.
    paired = q.shape[3] % 2 == 0 and dv % 2 == 0
    return "bf16" if paired and native.without_micro_kernel(_library, torch.bfloat16) is None else "bf16_as_float"


def _describe(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, more: tuple[int, ...]) -> tuple[Any, Tensor | None]:
    """`Sizes` of call.h, and the mask; `more`: strides of dout."""
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
    return native.numbers(numbers), mask
