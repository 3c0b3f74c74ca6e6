"""PyTorch's flash and cuDNN kernels, on CPU tensors, by their schemas and by what is known of them.

What they are known to refuse raises. A row without keys comes out as NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch


class Aten:
    """Stands in for torch.ops.aten; `calls` holds the operators' names in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        schema = getattr(torch.ops.aten, name).default._schema

        def call(*positional: Any, **keywords: Any) -> Any:
            self.calls.append(name)
            assert len(positional) + len(keywords) <= len(schema.arguments)
            bound: dict[str, Any] = {}
            for argument, value in zip(schema.arguments, positional, strict=False):
                assert not argument.kwarg_only, f"{name}: {argument.name} is keyword-only"
                bound[argument.name] = value
            for argument in schema.arguments[len(positional) :]:
                assert argument.name in keywords or argument.has_default_value(), f"{name} needs {argument.name}"
                bound[argument.name] = keywords.pop(argument.name, argument.default_value)
            assert not keywords, f"{name} has no {', '.join(keywords)}"
            return globals()[name](**bound)

        return call


def _visible(sq: int, sk: int, left: int | None, right: int | None) -> torch.Tensor:
    """A band from the last key; a missing or negative limit is none."""
    visible = torch.ones(sq, sk, dtype=torch.bool)
    if right is not None and right >= 0:
        visible = visible.tril(sk - sq + right)
    if left is not None and left >= 0:
        visible = visible.triu(sk - sq - left)
    return visible


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, visible: torch.Tensor | None) -> torch.Tensor:
    """[b, n, sq, sk] of q [b, sq, n, d] and k [b, sk, g, d]"""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bsnd,btnd->bnst", q.float(), k.float()) * scale
    return scores if visible is None else scores.masked_fill(~visible, float("-inf"))


def _forward(scores: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    v = v.repeat_interleave(scores.shape[1] // v.shape[2], dim=2)
    return torch.einsum("bnst,btnd->bsnd", scores.softmax(-1), v.float()).to(dtype), scores.logsumexp(-1)


def _backward(
    scores: torch.Tensor,
    scale: float,
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    ratio, g = q.shape[2] // k.shape[2], k.shape[2]
    keys, values = (t.float().repeat_interleave(ratio, dim=2) for t in (k, v))
    probs = (scores - lse.unsqueeze(-1)).exp()
    dprobs = torch.einsum("bsnd,btnd->bnst", grad.float(), values)
    delta = (grad.float() * out.float()).sum(-1).transpose(1, 2).unsqueeze(-1)
    dscores = probs * (dprobs - delta) * scale
    dq = torch.einsum("bnst,btnd->bsnd", dscores, keys)
    dk = torch.einsum("bnst,bsnd->btnd", dscores, q.float()).unflatten(2, (g, ratio)).sum(3)
    dv = torch.einsum("bnst,bsnd->btnd", probs, grad.float()).unflatten(2, (g, ratio)).sum(3)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _check_flash(*tensors: torch.Tensor, dims: int) -> None:
    sizes = {t.shape[-1] for t in tensors}
    if len(sizes) != 1 or max(sizes) > 256 or max(sizes) % 8:
        raise RuntimeError(f"head sizes {sizes}")
    for t in tensors:
        if t.dtype not in (torch.float16, torch.bfloat16) or t.stride(-1) != 1 or t.dim() != dims:
            raise RuntimeError(f"{t.dtype} {tuple(t.shape)} {t.stride()}")


def _spans(cum_seq: torch.Tensor, longest: int, rows: int) -> list[slice]:
    if cum_seq.dtype != torch.int32 or cum_seq[0] != 0 or cum_seq[-1] != rows:
        raise RuntimeError(f"cumulative lengths {cum_seq}")
    if cum_seq.diff().max() != longest:
        raise RuntimeError(f"longest of {cum_seq} is not {longest}")
    return [slice(int(a), int(b)) for a, b in itertools.pairwise(cum_seq)]


def _flash(args: dict[str, Any]) -> tuple[int | None, int | None]:
    if args["dropout_p"] != 0.0:
        raise NotImplementedError
    left, right = args["window_size_left"], args["window_size_right"]
    return left, 0 if args["is_causal"] else right


def _flash_attention_forward(**args: Any) -> tuple[torch.Tensor, ...]:
    q, k, v, scale = args["query"], args["key"], args["value"], args["scale"]
    limits, rest = _flash(args), (torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0))
    if args["cum_seq_q"] is None:
        _check_flash(q, k, v, dims=4)
        return (*_forward(_scores(q, k, scale, _visible(q.shape[1], k.shape[1], *limits)), v, q.dtype), *rest)
    _check_flash(q, k, v, dims=3)
    parts = []
    rows = _spans(args["cum_seq_q"], args["max_q"], q.shape[0]), _spans(args["cum_seq_k"], args["max_k"], k.shape[0])
    for a, b in zip(*rows, strict=True):
        one, keys = q[a].unsqueeze(0), k[b].unsqueeze(0)
        scores = _scores(one, keys, scale, _visible(one.shape[1], keys.shape[1], *limits))
        parts.append(_forward(scores, v[b].unsqueeze(0), q.dtype))
    out = torch.cat([part.squeeze(0) for part, _ in parts])
    return (out, torch.cat([lse.squeeze(0) for _, lse in parts], -1), *rest)


def _flash_attention_backward(**args: Any) -> tuple[torch.Tensor, ...]:
    grad, q, k, v, out, lse = (args[name] for name in ("grad_out", "query", "key", "value", "out", "logsumexp"))
    scale, limits = args["scale"], _flash(args)
    if lse.dtype != torch.float32 or not lse.is_contiguous():
        raise RuntimeError(f"logsumexp {lse.dtype} {lse.stride()}")
    if args["cum_seq_q"] is None:
        _check_flash(grad, q, k, v, out, dims=4)
        assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
        scores = _scores(q, k, scale, _visible(q.shape[1], k.shape[1], *limits))
        return _backward(scores, scale, grad, q, k, v, out, lse)
    _check_flash(grad, q, k, v, out, dims=3)
    assert lse.shape == (q.shape[1], q.shape[0])
    parts = []
    rows = _spans(args["cum_seq_q"], args["max_q"], q.shape[0]), _spans(args["cum_seq_k"], args["max_k"], k.shape[0])
    for a, b in zip(*rows, strict=True):
        one = [t.unsqueeze(0) for t in (grad[a], q[a], k[b], v[b], out[a], lse[:, a])]
        scores = _scores(one[1], one[2], scale, _visible(one[1].shape[1], one[2].shape[1], *limits))
        parts.append(_backward(scores, scale, *one))
    return tuple(torch.cat([part[i].squeeze(0) for part in parts]) for i in range(3))


def _cudnn(args: dict[str, Any]) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Inputs as flash has them, and the visible keys: causal order is aligned to the first."""
    given = [args[name] for name in ("query", "key", "value", "grad_out", "out") if name in args]
    _check_flash(*given, dims=4)
    if args["dropout_p"] != 0.0 or args["attn_bias"] is not None or max(t.shape[-1] for t in given) > 128:
        raise NotImplementedError
    rows, keys = given[0].shape[2], given[1].shape[2]
    visible = torch.ones(rows, keys, dtype=torch.bool).tril() if args["is_causal"] else None
    return [t.transpose(1, 2) for t in given], visible


def _scaled_dot_product_cudnn_attention(**args: Any) -> tuple[torch.Tensor | None, ...]:
    (q, k, v), visible = _cudnn(args)
    assert args["compute_log_sumexp"] and not args["return_debug_mask"]
    out, lse = _forward(_scores(q, k, args["scale"], visible), v, q.dtype)
    return out.transpose(1, 2), lse.unsqueeze(-1), *[None] * 7


def _scaled_dot_product_cudnn_attention_backward(**args: Any) -> tuple[torch.Tensor, ...]:
    (q, k, v, grad, out), visible = _cudnn(args)
    lse = args["logsumexp"]
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1], 1) and lse.is_contiguous() and lse.dtype == torch.float32
    assert (args["max_q"], args["max_k"]) == (q.shape[1], k.shape[1])
    scores = _scores(q, k, args["scale"], visible)
    return tuple(t.transpose(1, 2) for t in _backward(scores, args["scale"], grad, q, k, v, out, lse.squeeze(-1)))
