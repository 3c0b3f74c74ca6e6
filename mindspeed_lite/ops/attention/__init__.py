"""Softmax attention in the layout [sequence, batch, head, head size], for a transformer's attention core.

`attention` is `prepare`, which checks a call and makes its `AttentionSpec`, and `attend`, which computes it. `forward`
and `backward` are its halves without autograd, for callers that merge results over parts of the keys (context
parallelism). `packed.attention` takes sequences of several lengths.

A backend has `supported(case)`, `attention(q, k, v, spec)` -> (out, lse or None unless `spec.return_lse`),
`forward(q, k, v, spec)` and `backward(dout, q, k, v, out, lse, spec)`. With `HAS_WIDE` the halves take `wide`: fp32
sums of 16-bit inputs, not rounded. No row is empty by position, and the halves ignore `spec.sink`.
"""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_lite.ops.attention import band, blocked, reference
from mindspeed_lite.ops.attention.blocked import PositionalDropout
from mindspeed_lite.ops.attention.spec import AttentionSpec, Case, prepare
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


OPERATOR = Operator("attention", reference.attention)  # type: ignore[arg-type]  # two results


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    window: band.Window | None = None,
    sink: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """out[s, b, i] = sum_t dropout(p[s, t]) * v[t, b, j], p[s, t] = exp(scale * q[s, b, i] . k[t, b, j] - lse)

    where j = i * g // n and lse is the log of the sum, over the visible keys t, of exp(scale * q . k), plus
    exp(sink[i]) if there is a sink.

    q: [sq, b, n, d], k: [sk, b, g, d], v: [sk, b, g, dv], one dtype, any strides; g divides n. Returns out
    [sq, b, n, dv], contiguous, in q's dtype; with `return_lse` also lse [b, n, sq] in fp32 (float64 for float64),
    natural logarithm, without gradient. Scores and softmax are fp32. Keeps q, k, v, the output and one number per row
    and head.

    causal: a query sees no later key. With sq != sk the last query is aligned with the last key (bottom right).
    window: (left, right): `left` keys before the query's own and `right` after it; -1 is no limit.
    mask: bool, True hides the key, broadcastable to [b, n or 1, sq, sk]; combined with the other two.
    scale: 1 / sqrt(d) unless given; above 0 and finite in fp32.
    dropout_p: drawn from the device's default generator, by each backend in its own way.
    sink: [n], any floating dtype, one logit per head without a value (Megatron's softmax offset). It gets its gradient.

    A row without visible keys returns 0, has the lse -inf (the sink's value if there is one) and gives no gradient;
    Megatron averages all values there.
    """
    options = {"causal": causal, "mask": mask, "scale": scale, "dropout_p": dropout_p, "window": window, "sink": sink}
    out, lse = attend(q, k, v, prepare(q, k, v, **options, return_lse=return_lse))  # type: ignore[arg-type]
    return (out, lse) if return_lse else out


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, lse) of `attention` for a call that `prepare` has checked; without `spec.return_lse` lse may be None."""
    if spec.rows_without_keys:
        rest = attend(q[spec.rows_without_keys :], k, v, _below(spec, q, k))
        return _behind(rest, spec.rows_without_keys, spec.sink)
    # Kernels differ on what they accept of empty tensors, and there is nothing to win.
    implementation = reference.attention if spec.empty else OPERATOR.choose(spec.case)
    result: tuple[torch.Tensor, torch.Tensor | None] = implementation(q, k, v, spec)  # type: ignore[assignment]
    return result


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    *,
    wide: bool = False,
    dropout: PositionalDropout | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of `attention` over these keys, without autograd; `spec` has no sink and no dropout of its own.

    Results over disjoint sets of keys merge: lse = logaddexp(lse1, lse2) and out = out1 * exp(lse1 - lse) +
    out2 * exp(lse2 - lse); a row with lse -inf in one of them takes no part in it.

    wide: `out` in fp32 (float64 for float64), for a sum over several results; not rounded in between by a backend with
        `HAS_WIDE` (CPU).
    dropout: which weights are dropped, by position; in plain PyTorch on every device.
    """
    _check_half(spec)
    if spec.rows_without_keys:
        cut = spec.rows_without_keys
        below = dropout and dropout.of_rows(slice(cut, None))
        rest = forward(q[cut:], k, v, _below(spec, q, k), wide=wide, dropout=below)
        return _behind(rest, cut, None)
    backend = module(spec)
    if dropout is not None and not spec.empty:
        backend, spec = blocked, spec._replace(rng=dropout)
    pair: tuple[torch.Tensor, torch.Tensor]
    if not wide or not _is_narrow(q.dtype):
        pair = backend.forward(q, k, v, spec)
        return pair
    if hasattr(backend, "HAS_WIDE"):
        pair = backend.forward(q, k, v, spec, wide=True)
        return pair
    out, lse = backend.forward(q, k, v, spec)
    return out.float(), lse


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
    dropout: PositionalDropout | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients (dq, dk, dv) that these keys contribute, without autograd, in the dtypes of q, k and v.

    dout, out: [sq, b, n, dv], any strides; lse: [b, n, sq]. `out` and `lse` are those of the whole softmax, sink
    included; p = exp(score - lse). A row with lse -inf gives no gradient. `wide`, `dropout`: as in `forward`.
    """
    _check_half(spec)
    empty = spec.rows_without_keys
    if empty:
        rows = (dout[empty:], q[empty:], k, v, out[empty:], lse[..., empty:])
        below = dropout and dropout.of_rows(slice(empty, None))
        dq, dk, dv = backward(*rows, _below(spec, q, k), wide=wide, dropout=below)
        return torch.nn.functional.pad(dq, (0, 0) * 3 + (empty, 0)), dk, dv
    backend = module(spec)
    if dropout is not None and not spec.empty:
        backend, spec = blocked, spec._replace(rng=dropout)
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    if not wide or not _is_narrow(q.dtype):
        gradients = backend.backward(dout, q, k, v, out, lse, spec)
        return gradients
    if hasattr(backend, "HAS_WIDE"):
        gradients = backend.backward(dout, q, k, v, out, lse, spec, wide=True)
        return gradients
    dq, dk, dv = backend.backward(dout, q, k, v, out, lse, spec)
    return dq.float(), dk.float(), dv.float()


def fallback_reasons(spec: AttentionSpec) -> list[str]:
    """Every reason why the call would run on the reference, not on its device's backend."""
    return OPERATOR.why_not(spec.case)


def module(spec: AttentionSpec) -> Any:
    """The module of the backend that serves a call."""
    return reference if spec.empty else OPERATOR.module(spec.case)


def _is_narrow(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def _check_half(spec: AttentionSpec) -> None:
    if spec.sink is not None or spec.dropout_p > 0.0:
        raise ValueError("attention: forward and backward take no sink (put it to the whole softmax) and no dropout")


def _below(spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor) -> AttentionSpec:
    """What remains to be asked for the queries after `spec.rows_without_keys`."""
    rows, mask = spec.rows_without_keys, spec.mask
    if mask is not None and mask.dim() >= 2 and mask.shape[-2] > 1:
        spec = spec._replace(mask=mask[..., rows:, :])
    return spec.for_lengths(q.shape[0] - rows, k.shape[0])


def _behind(result: tuple[torch.Tensor, Any], empty: int, sink: torch.Tensor | None) -> tuple[torch.Tensor, Any]:
    """A result with `empty` rows that see nothing put before its rows."""
    out, lse = result
    out = torch.nn.functional.pad(out, (0, 0) * 3 + (empty, 0))
    if lse is not None:
        b, n, _ = lse.shape
        if sink is None:
            before = lse.new_full((b, n, empty), float("-inf"))
        else:
            before = sink.detach().to(lse.dtype).reshape(1, n, 1).expand(b, n, empty)
        lse = torch.cat([before, lse], -1)
    return out, lse
