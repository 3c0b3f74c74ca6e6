"""Softmax attention, [sequence, batch, head, head size], for a transformer's attention core.

`forward` and `backward` run without autograd, for callers that merge results over parts of the keys (context
parallelism).

Backends define `supported(case)`, `attention(q, k, v, spec)`, and `forward` and `backward`, which ignore `spec.sink`.
Every row sees a key by position. `UNROUNDED`: kernels whose results are fp32 for 16-bit inputs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mindspeed_lite.ops.attention import blocked, reference
from mindspeed_lite.ops.attention.blocked import PositionalDropout
from mindspeed_lite.ops.attention.spec import AttentionSpec, Case, prepare
from mindspeed_lite.ops.batch_invariant import CANN, TORCH
from mindspeed_lite.ops.dispatch import Operator

__all__ = [
    "OPERATOR",
    "AttentionSpec",
    "Case",
    "PositionalDropout",
    "attend",
    "attention",
    "backward",
    "forward",
    "prepare",
    "fallback_reasons",
]


_SPLIT_KEYS = "PyTorch's fused kernels split the keys by the number of sequences"
OPERATOR = Operator(
    "attention",
    reference.attention,
    batch_dependence={"reference": TORCH, "cpu": "", "cuda": _SPLIT_KEYS, "npu": CANN},
)


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """out[s, b, i] = sum_t dropout(p[s, t]) * v[t, b, j], p = exp(scale * q[s, b, i] . k[t, b, j] - lse)

    where j = i * g // n and lse = log(sum over visible keys t of exp(scale * q . k), plus exp(sink[i]) if given).

    q: [sq, b, n, d], k: [sk, b, g, d], v: [sk, b, g, dv], one dtype, any strides; g divides n. options: of `prepare`.
    Returns out [sq, b, n, dv], contiguous, in q's dtype. Scores and softmax are fp32 (float64 for float64). Saves q, k,
    v, the output and lse.

    A row without visible keys returns 0 and gives no gradient; Megatron averages all values there.
    """
    return attend(q, k, v, prepare(q, k, v, **options))


def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """`attention` for a `prepare`d call."""
    implementation = reference.attention if spec.degenerate else OPERATOR.choose(spec.case)
    return implementation(q, k, v, spec)


def forward(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, dropout: PositionalDropout | None = None
) -> tuple[Tensor, Tensor]:
    """out and lse [b, n, sq] of `attention` over these keys, without autograd; `spec` has no sink and no dropout.

    Results over disjoint sets of keys merge: lse = logaddexp(lse1, lse2) and out = out1 * exp(lse1 - lse) +
    out2 * exp(lse2 - lse); a row with lse -inf contributes nothing. `out` has lse's dtype.

    dropout: positional dropout; runs in plain PyTorch on every device.
    """
    kernels, spec = _without_autograd(spec, dropout)
    out, lse = kernels.forward(q, k, v, spec)
    return out.to(lse.dtype), lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec,
    dropout: PositionalDropout | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients (dq, dk, dv) of these keys, without autograd, in lse's dtype.

    dout, out: [sq, b, n, dv], any strides; lse: [b, n, sq]. `out` and `lse` are of the whole softmax, sink included;
    p = exp(score - lse). A row with lse -inf gives no gradient. `dropout`: as in `forward`.
    """
    kernels, spec = _without_autograd(spec, dropout)
    # Kernels read the rounded output.
    dq, dk, dv = kernels.backward(dout, q, k, v, out.to(q.dtype), lse, spec)
    return dq.to(lse.dtype), dk.to(lse.dtype), dv.to(lse.dtype)


def fallback_reasons(spec: AttentionSpec) -> list[str]:
    """Reasons why the call would run on the reference."""
    return OPERATOR.why_not(spec.case)


def module(spec: AttentionSpec) -> Any:
    """The backend module that serves a call."""
    return reference if spec.degenerate else OPERATOR.module(spec.case)


def _without_autograd(spec: AttentionSpec, dropout: PositionalDropout | None) -> tuple[Any, AttentionSpec]:
    if spec.sink is not None or spec.dropout_p > 0.0:
        raise ValueError("attention: forward and backward take no sink (put it to the whole softmax) and no dropout")
    if dropout is not None:
        return blocked, spec._replace(rng=dropout)
    backend = module(spec)
    return getattr(backend, "UNROUNDED", backend), spec
