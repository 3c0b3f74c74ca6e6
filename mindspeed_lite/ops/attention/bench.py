"""Implementations that attention is compared with; cases.py declares the cases."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from mindspeed_lite.ops.attention import attention, packed
from mindspeed_lite.ops.attention.cases import PACKED_ENDS, Shape
from mindspeed_lite.ops.case import Case, movable


def ours(case: Case) -> Callable[..., torch.Tensor]:
    """The operator."""
    causal, window = case.shape.causal, _window(case.shape)
    return lambda q, k, v: attention(q, k, v, causal=causal, window=window)


def plain(case: Case) -> Callable[..., torch.Tensor]:
    """What Megatron's local DotProductAttention computes; the mask and the buffer are made once, as there."""
    s, b, n, g, d = case.shape[:5]
    buffer = torch.empty(b * n, s, s, device=case.device, dtype=case.torch_dtype)
    mask = hidden(case.shape, case.device)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if n != g:
            k, v = k.repeat_interleave(n // g, dim=2), v.repeat_interleave(n // g, dim=2)
        q, k, v = (t.reshape(s, b * n, d) for t in (q, k, v))
        scores = torch.baddbmm(
            buffer, q.transpose(0, 1), k.transpose(0, 1).transpose(1, 2), beta=0.0, alpha=d**-0.5
        )  # [b * n, s, s]
        if mask is not None:
            scores.masked_fill_(mask, -10000.0)
        context = torch.bmm(scores.softmax(-1), v.transpose(0, 1))  # [b * n, s, d]
        return context.view(b, n, s, d).permute(2, 0, 1, 3).contiguous()

    return run


def hidden(shape: Shape, device: str) -> torch.Tensor | None:
    """[s, s] bool, True where the key is hidden, or None where every key is visible."""
    if not shape.causal and shape.w < 0:
        return None
    visible = torch.ones(shape.s, shape.s, dtype=torch.bool, device=device)
    if shape.w >= 0:
        visible = visible.triu_(-shape.w).tril_(shape.w)
    if shape.causal:
        visible = visible.tril_()
    return ~visible


def sdpa(case: Case) -> Callable[..., torch.Tensor]:
    """PyTorch's fused function, as a user would call it."""
    shape: Shape = case.shape
    seen = hidden(shape, case.device) if shape.w >= 0 else None
    mask = None if seen is None else ~seen
    causal = shape.causal and mask is None

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # [b, n or g, s, d]
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=shape.n != shape.g
        )
        return out.permute(2, 0, 1, 3).contiguous()

    return run


def flash_attn(case: Case) -> Callable[..., torch.Tensor]:
    """flash-attn's."""
    function: Any = importlib.import_module("flash_attn").flash_attn_func
    causal, window = case.shape.causal, _window(case.shape) or (-1, -1)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))  # [b, s, n or g, d]
        out: torch.Tensor = function(q, k, v, causal=causal, window_size=window)
        return out.transpose(0, 1).contiguous()

    return run


def transformer_engine(case: Case) -> Callable[..., torch.Tensor]:
    """Transformer Engine's module."""
    shape: Shape = case.shape
    module: Any = importlib.import_module("transformer_engine.pytorch").DotProductAttention(
        shape.n,
        shape.d,
        num_gqa_groups=shape.g,
        attention_dropout=0.0,
        qkv_format="sbhd",
        attn_mask_type="causal" if shape.causal else "no_mask",
        window_size=_window(shape),
    )

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = module(q, k, v)
        return out.view(shape.s, shape.b, shape.n, shape.d)

    return run


def masked_ours(case: Case) -> Callable[..., torch.Tensor]:
    """The operator with a mask of its own for each sequence, on top of the causal order."""
    mask = movable(_random_mask(case))
    return lambda q, k, v: attention(q, k, v, mask=mask(q))


def masked_plain(case: Case) -> Callable[..., torch.Tensor]:
    """The same, score by score."""
    mask, d = movable(_random_mask(case)), case.shape.d

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # [b, n, s, d]
        scores = (q @ k.transpose(2, 3) * d**-0.5).masked_fill(mask(q), -10000.0)
        out: torch.Tensor = scores.softmax(-1) @ v
        return out.permute(2, 0, 1, 3).contiguous()

    return run


def inputs(case: Case) -> tuple[torch.Tensor, ...]:
    """Of the variant with a softmax offset: q, k, v, and one more logit per head."""
    s, b, n, _, d = case.shape[:5]
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(s, b, n, d, generator=generator) for _ in range(3)]
    return tuple(each.to(case.device, case.torch_dtype).requires_grad_() for each in (*made, torch.linspace(-2, 2, n)))


def offset_ours(case: Case) -> Callable[..., torch.Tensor]:
    """The operator whose softmax has one more logit per head."""
    return lambda q, k, v, sink: attention(q, k, v, causal=True, sink=sink)


def offset_plain(case: Case) -> Callable[..., torch.Tensor]:
    """The same, score by score."""
    s, b, n, _, d = case.shape[:5]
    above = movable(torch.ones(s, s, dtype=torch.bool).triu(1))

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # [b, n, s, d]
        scores = (q @ k.transpose(2, 3) * d**-0.5).masked_fill(above(q), -10000.0)
        logits = torch.cat([scores, sink.reshape(1, n, 1, 1).expand(b, n, s, 1)], -1)
        out: torch.Tensor = logits.softmax(-1)[..., :-1] @ v
        return out.permute(2, 0, 1, 3).contiguous()

    return run


def packed_ours(case: Case) -> Callable[..., torch.Tensor]:
    """The operator over sequences behind one another."""
    packing = packed.Packing.of(PACKED_ENDS)
    return lambda q, k, v: packed.attention(q, k, v, packing, causal=True)


def packed_plain(case: Case) -> Callable[..., torch.Tensor]:
    """The same, score by score."""
    s, d = case.shape.s, case.shape.d
    document = torch.arange(s).unsqueeze(-1).ge(torch.tensor(PACKED_ENDS[1:])).sum(-1)
    mask = movable((document.unsqueeze(-1) != document) | torch.ones(s, s, dtype=torch.bool).triu(1))

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))  # [n, s, d]
        scores = (q @ k.transpose(1, 2) * d**-0.5).masked_fill(mask(q), -10000.0)
        out: torch.Tensor = (scores.softmax(-1) @ v).transpose(0, 1)
        return out.contiguous()

    return run


def _window(shape: Shape) -> tuple[int, int] | None:
    return None if shape.w < 0 else (shape.w, 0 if shape.causal else shape.w)


def _random_mask(case: Case) -> torch.Tensor:
    """[b, 1, s, s], True where the key is hidden."""
    s, b = case.shape.s, case.shape.b
    mask = torch.rand(b, 1, s, s, generator=torch.Generator().manual_seed(3)) < 0.3
    mask |= torch.ones(s, s, dtype=torch.bool).triu(1)
    mask[..., range(s), range(s)] = False  # no row without keys: there the plain path has an answer of its own
    return mask
