"""Softmax attention, [sequence, batch, head, head size], for a transformer's attention core.

`forward` and `backward` run without autograd, for callers that merge results over parts of the keys (context
parallelism).

Backends define `supported(case)`, `attention(q, k, v, spec)` -> (out, lse or None unless `spec.return_lse`), and
`forward` and `backward` without `dropout`, which ignore `spec.sink`. `HAS_WIDE`: these take `wide`, unrounded fp32
results of 16-bit inputs. Every row sees a key by position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
    return_lse: bool = False,
) -> Any:
    """out[s, b, i] = sum_t dropout(p[s, t]) * v[t, b, j], p = exp(scale * q[s, b, i] . k[t, b, j] - lse)

    where j = i * g // n and lse = log(sum over visible keys t of exp(scale * q . k), plus exp(sink[i]) if given).

    q: [sq, b, n, d], k: [sk, b, g, d], v: [sk, b, g, dv], one dtype, any strides; g divides n. Returns out
    [sq, b, n, dv], contiguous, in q's dtype; with `return_lse` also lse [b, n, sq] in fp32 (float64 for float64),
    without gradient. Scores and softmax are fp32. Saves q, k, v, the output and lse.

    causal: the last query is aligned with the last key (bottom right).
    window: (left, right): visible keys before and after the query's own; -1 is no limit.
    mask: bool, True hides the key, broadcastable to [b, n or 1, sq, sk]; combined with the other two.
    scale: default 1 / sqrt(d); above 0 and finite in fp32.
    dropout_p: drawn from the device's default generator; the pattern depends on the backend.
    sink: [n], any floating dtype, one logit per head without a value (Megatron's softmax offset). Differentiable.

    A row without visible keys returns 0, has lse -inf (or the sink's value) and gives no gradient; Megatron averages
    all values there.
    """
    options = {"causal": causal, "mask": mask, "scale": scale, "dropout_p": dropout_p, "window": window, "sink": sink}
    out, lse = attend(q, k, v, prepare(q, k, v, **options, return_lse=return_lse))  # type: ignore[arg-type]
    return (out, lse) if return_lse else out


def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of `attention` for a `prepare`d call; lse may be None without `spec.return_lse`."""
    if spec.rows_without_keys:
        rest = attend(q[spec.rows_without_keys :], k, v, _below(spec, q, k))
        return _behind(rest, spec.rows_without_keys, spec.sink)
    # Kernels differ on which empty tensors they accept.
    implementation = reference.attention if spec.empty else OPERATOR.choose(spec.case)
    result: tuple[Tensor, Tensor | None] = implementation(q, k, v, spec)  # type: ignore[assignment]
    return result


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    wide: bool = False,
    dropout: PositionalDropout | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `attention` over these keys, without autograd; `spec` has no sink and no dropout.

    Results over disjoint sets of keys merge: lse = logaddexp(lse1, lse2) and out = out1 * exp(lse1 - lse) +
    out2 * exp(lse2 - lse); a row with lse -inf contributes nothing.

    wide: `out` in fp32 (float64 for float64); unrounded with a backend that has `HAS_WIDE` (CPU).
    dropout: positional dropout; runs in plain PyTorch on every device.
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
    pair: tuple[Tensor, Tensor]
    if not wide or not _is_narrow(q.dtype):
        pair = backend.forward(q, k, v, spec)
        return pair
    if hasattr(backend, "HAS_WIDE"):
        pair = backend.forward(q, k, v, spec, wide=True)
        return pair
    out, lse = backend.forward(q, k, v, spec)
    return out.float(), lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spec: AttentionSpec,
    *,
    wide: bool = False,
    dropout: PositionalDropout | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) of these keys, without autograd, in the dtypes of q, k and v.

    dout, out: [sq, b, n, dv], any strides; lse: [b, n, sq]. `out` and `lse` are of the whole softmax, sink included;
    p = exp(score - lse). A row with lse -inf gives no gradient. `wide`, `dropout`: as in `forward`.
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
    gradients: tuple[Tensor, Tensor, Tensor]
    if not wide or not _is_narrow(q.dtype):
        gradients = backend.backward(dout, q, k, v, out, lse, spec)
        return gradients
    if hasattr(backend, "HAS_WIDE"):
        gradients = backend.backward(dout, q, k, v, out, lse, spec, wide=True)
        return gradients
    dq, dk, dv = backend.backward(dout, q, k, v, out, lse, spec)
    return dq.float(), dk.float(), dv.float()


def fallback_reasons(spec: AttentionSpec) -> list[str]:
    """Reasons why the call would run on the reference."""
    return OPERATOR.why_not(spec.case)


def module(spec: AttentionSpec) -> Any:
    """The backend module that serves a call."""
    return reference if spec.empty else OPERATOR.module(spec.case)


def _is_narrow(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def _check_half(spec: AttentionSpec) -> None:
    if spec.sink is not None or spec.dropout_p > 0.0:
        raise ValueError("attention: forward and backward take no sink (put it to the whole softmax) and no dropout")


def _below(spec: AttentionSpec, q: Tensor, k: Tensor) -> AttentionSpec:
    rows, mask = spec.rows_without_keys, spec.mask
    if mask is not None and mask.dim() >= 2 and mask.shape[-2] > 1:
        spec = spec._replace(mask=mask[..., rows:, :])
    return spec.for_lengths(q.shape[0] - rows, k.shape[0])


def _behind(result: tuple[Tensor, Any], empty: int, sink: Tensor | None) -> tuple[Tensor, Any]:
    """Prepends `empty` rows that see no key."""
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
