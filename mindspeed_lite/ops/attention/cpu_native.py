"""attention on CPU in C++ (`cpu.cpp`): nothing of size sq x sk, and products in micro-kernels.

It takes bf16 and fp32 on processors with AVX2: PyTorch exports oneDNN's micro-kernels, and has none for less.
Processors with AVX-512 BF16 or AMX multiply bf16 as it is; on others K, V and each tile of queries are widened to fp32
once. With AVX-512 BF16 and no AMX the kernel multiplies bf16 itself, and keeps scores and their softmax in registers.
Dropout is drawn from a seed by position, so that the backward pass drops the same and nothing of it is stored; the seed
comes from the default generator.

Results do not depend on the number of threads: each sum is taken in an order that the shapes alone decide.
"""

from __future__ import annotations

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
        "forward_bf16": "pppppfppii",
        "forward_bf16_as_float": "pppppfppii",
        "forward_float": "pppppfppii",
        "backward_bf16": "pppppfppppppii",
        "backward_bf16_as_float": "pppppfppppppii",
        "backward_float": "pppppfppppppii",
        "probe": "ip",
    },
    uses_torch=True,
    returns_status=True,
)


# Probabilities of dropout are multiples of 2^-32, above 0 and below 1.
_DRAWS = 1 << 32


def unusable() -> str | None:
    """Why this machine cannot run the kernel now, or None."""
    return native.without_micro_kernel(_library, torch.float32)


def takes(case: Case) -> bool:
    """Whether these are tensors for the kernel; for others PyTorch's own serves."""
    return case.dtype in (torch.bfloat16, torch.float32)


def drawn(spec: AttentionSpec) -> AttentionSpec:
    """With a seed, from which both halves drop the same."""
    return spec._replace(rng=int(torch.randint(1 << 62, ())))


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, *, wide: bool = False
) -> autograd.Pair:
    """As a backend's; wide: `out` is the fp32 sums, not rounded."""
    q, k, v = _rows(q), _rows(k), _rows(v)
    (sq, b, n, _), dv = q.shape, v.shape[3]
    out = torch.empty(sq, b, n, dv, dtype=torch.float32 if wide else q.dtype)
    lse = torch.empty(b, n, sq)
    numbers, hidden = _describe(q, k, v, spec, ())
    getattr(_library, f"forward_{_numbers_of(q, dv)}")(
        q,
        k,
        v,
        numbers,
        hidden,
        spec.scale,
        out,
        lse,
        wide,
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
    *,
    wide: bool = False,
) -> autograd.Triple:
    """As a backend's; wide: the gradients are the fp32 sums, not rounded."""
    q, k, v, dout = _rows(q), _rows(k), _rows(v), _rows(dout)
    out, lse = out.contiguous(), lse.contiguous()
    dq, dk, dv = (torch.empty(t.shape, dtype=torch.float32 if wide else t.dtype) for t in (q, k, v))
    numbers, hidden = _describe(q, k, v, spec, dout.stride()[:3])
    getattr(_library, f"backward_{_numbers_of(q, v.shape[3])}")(
        q,
        k,
        v,
        numbers,
        hidden,
        spec.scale,
        out,
        lse,
        dout,
        dq,
        dk,
        dv,
        wide,
        torch.get_num_threads(),
    )
    return dq, dk, dv


def _rows(t: torch.Tensor) -> torch.Tensor:
    """The kernel reads a row of a head as one run of memory."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _numbers_of(q: torch.Tensor, dv: int) -> str:
    """What is read, and what is multiplied where that differs: the end of a function's name."""
    if q.dtype == torch.float32:
        return "float"
    # The bf16 micro-kernels take pairs of numbers along a head.
    paired = q.shape[3] % 2 == 0 and dv % 2 == 0
    return "bf16" if paired and native.without_micro_kernel(_library, torch.bfloat16) is None else "bf16_as_float"


def _describe(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, more: tuple[int, ...]
) -> tuple[Any, torch.Tensor | None]:
    """The kernel's array of numbers, and the mask."""
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
