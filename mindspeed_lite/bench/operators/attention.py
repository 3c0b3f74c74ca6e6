"""attention: against what Megatron's local DotProductAttention computes, and against PyTorch's fused function.

`torch` writes every score to memory, as Megatron does without us: baddbmm, a mask, softmax, bmm. `torch sdpa` is
`scaled_dot_product_attention` as a user would call it, with the layout changed there and back.

Counted as operations: two for each multiply-add of the matrix products, over the pairs of query and key that the
mask leaves, 2 products forward and 4 backward (computing the scores again, as flash kernels do, is their choice and
not counted). Counted as bytes: forward reads q, k and v and writes the output; backward reads these four and the
output's gradient and writes three gradients.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mindspeed_lite.bench.operators import OURS, TORCH, Case, Contender, Work, compiled, dtype_name, peers
from mindspeed_lite.ops.attention import attention

_EXAMPLE = "for example s=1024,b=1,n=16,g=16,d=64"


class Shape(NamedTuple):
    """Sequence, batch, query heads, key heads, head size; keys before the query's own, or -1; causal order."""

    s: int
    b: int
    n: int
    g: int
    d: int
    w: int
    causal: bool


def shapes(device: str, quick: bool) -> list[str]:
    """The model of this project's CPU runs short and long, grouped heads (Llama 8B), a window (Mistral's idea)."""
    if quick:
        return ["s=256,n=16,d=64"]
    chosen = ["s=1024,n=16,d=64", "s=4096,n=16,d=64", "s=2048,n=32,g=8,d=128", "s=4096,n=16,d=64,w=1024"]
    return chosen if device == "cpu" else [*chosen, "s=8192,n=32,g=8,d=128"]


def parse(text: str) -> Shape:
    """The shape of `s=1024,n=16,d=64`.

    Raises:
        ValueError: what is wrong with the text.
    """
    given: dict[str, int] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if key not in Shape._fields:
            raise ValueError(f"{key!r} is none of {', '.join(Shape._fields)}; {_EXAMPLE}")
        if key in given:
            raise ValueError(f"{key} is given twice")
        if not equals or not value.isdecimal() or (key != "causal" and int(value) < (0 if key == "w" else 1)):
            raise ValueError(f"{key} needs a whole number{'' if key in ('w', 'causal') else ' of at least 1'}")
        given[key] = int(value)
    missing = [key for key in ("s", "n", "d") if key not in given]
    if missing:
        raise ValueError(f"{' and '.join(missing)} missing; {_EXAMPLE}")
    causal = given.pop("causal", 1)
    if causal not in (0, 1):
        raise ValueError(f"causal is 0 or 1, not {causal}")
    shape = Shape(**{"b": 1, "g": given["n"], "w": -1, **given}, causal=bool(causal))
    if shape.n % shape.g:
        raise ValueError(f"g={shape.g} key heads do not divide n={shape.n} heads")
    return shape


def case(text: str, device: str, dtype: torch.dtype) -> Case:
    """The case of such a text."""
    shape = parse(text)
    s, b, n, g, d, w, causal = shape
    window = None if w < 0 else (w, 0 if causal else w)

    def make() -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        sizes = ((s, b, n, d), (s, b, g, d), (s, b, g, d))
        return tuple(torch.randn(size, generator=generator).to(device, dtype).requires_grad_() for size in sizes)

    queries, keys = s * b * n * d * dtype.itemsize, s * b * g * d * dtype.itemsize
    product = 2 * b * n * d * visible_pairs(shape)
    options = ("" if causal else " full") + ("" if w < 0 else f" w={w}")
    return Case(
        operator="attention",
        name=f"s={s} b={b} n={n} g={g} d={d}{options} {dtype_name(dtype)}",
        device=device,
        dtype=dtype,
        make=make,
        forward=Work(2 * queries + 2 * keys, 2 * product),
        both=Work(6 * queries + 6 * keys, 6 * product),
        contenders=(
            Contender(OURS, lambda: lambda q, k, v: attention(q, k, v, causal=causal, window=window)),
            Contender(TORCH, lambda: plain(shape, device, dtype)),
            Contender("torch sdpa", lambda: _sdpa(shape, device)),
            compiled(lambda: plain(shape, device, dtype)),
            *peers(
                device,
                ("flash_attn", Contender("flash_attn", lambda: _flash_attn(causal, window))),
                ("transformer_engine", Contender("transformer_engine", lambda: _transformer_engine(shape, window))),
            ),
        ),
    )


def visible_pairs(shape: Shape) -> int:
    """How many pairs of query and key one head computes."""
    before = shape.s - 1 if shape.w < 0 else min(shape.w, shape.s - 1)
    # Query i sees min(i, before) keys before its own.
    earlier = before * (before + 1) // 2 + (shape.s - 1 - before) * before
    return shape.s + (earlier if shape.causal else 2 * earlier)


def plain(shape: Shape, device: str, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """What Megatron's local DotProductAttention computes; the mask and the buffer are made once, as there."""
    s, b, n, g, d = shape[:5]
    buffer = torch.empty(b * n, s, s, device=device, dtype=dtype)
    hidden = _hidden(shape, device)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if n != g:
            k, v = k.repeat_interleave(n // g, dim=2), v.repeat_interleave(n // g, dim=2)
        q, k, v = (t.reshape(s, b * n, d) for t in (q, k, v))
        scores = torch.baddbmm(
            buffer, q.transpose(0, 1), k.transpose(0, 1).transpose(1, 2), beta=0.0, alpha=d**-0.5
        )  # [b * n, s, s]
        if hidden is not None:
            scores.masked_fill_(hidden, -10000.0)
        context = torch.bmm(scores.softmax(-1), v.transpose(0, 1))  # [b * n, s, d]
        return context.view(b, n, s, d).permute(2, 0, 1, 3).contiguous()

    return run


def _hidden(shape: Shape, device: str) -> torch.Tensor | None:
    """[s, s] bool, True where the key is hidden, or None where every key is visible."""
    if not shape.causal and shape.w < 0:
        return None
    visible = torch.ones(shape.s, shape.s, dtype=torch.bool, device=device)
    if shape.w >= 0:
        visible = visible.triu_(-shape.w).tril_(shape.w)
    if shape.causal:
        visible = visible.tril_()
    return ~visible


def _sdpa(shape: Shape, device: str) -> Callable[..., torch.Tensor]:
    hidden = _hidden(shape, device) if shape.w >= 0 else None
    mask = None if hidden is None else ~hidden
    causal = shape.causal and mask is None

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # [b, n or g, s, d]
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=shape.n != shape.g
        )
        return out.permute(2, 0, 1, 3).contiguous()

    return run


def _flash_attn(causal: bool, window: tuple[int, int] | None) -> Callable[..., torch.Tensor]:
    function: Any = importlib.import_module("flash_attn").flash_attn_func

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))  # [b, s, n or g, d]
        out: torch.Tensor = function(q, k, v, causal=causal, window_size=window or (-1, -1))
        return out.transpose(0, 1).contiguous()

    return run


def _transformer_engine(shape: Shape, window: tuple[int, int] | None) -> Callable[..., torch.Tensor]:
    module: Any = importlib.import_module("transformer_engine.pytorch").DotProductAttention(
        shape.n,
        shape.d,
        num_gqa_groups=shape.g,
        attention_dropout=0.0,
        qkv_format="sbhd",
        attn_mask_type="causal" if shape.causal else "no_mask",
        window_size=window,
    )

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = module(q, k, v)
        return out.view(shape.s, shape.b, shape.n, shape.d)

    return run
