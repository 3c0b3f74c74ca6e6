"""`mindspeed_lite.ops.attention` on npu_fusion_attention and npu_fusion_attention_grad."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

from mindspeed_lite.ops.attention import attention as operator
from mindspeed_lite.ops.attention import packed
from mindspeed_lite.parallel.context import blocks, zigzag
from tests.npu_contract.definitions import (
    DTYPES,
    Call,
    Make,
    OperatorCall,
    by_name,
    cumulative_ends,
    is_tensor,
)  # fmt: skip
from tests.npu_contract.recorder import TRIANGLE

LANES = 8
LAYOUTS = ("SBH", "BSH", "BSND", "BNSD", "TND")
UNLIMITED = 2147483647
FULL_TOKENS, FULL_MASK, UPPER_LEFT, LOWER_RIGHT, BAND = 0, 1, 2, 3, 4
COMPRESSED = (UPPER_LEFT, LOWER_RIGHT, BAND)
UNFUSED = ("aten::_softmax", "aten::baddbmm", "aten::bmm")


def _attention(
    sq: int = 24, sk: int = 24, b: int = 2, n: int = 4, g: int = 4, d: int = 64, dv: int = 64, dtype: str = "bfloat16",
    mask: tuple[int, ...] | None = None, sink: bool = False, projected: bool = False, **options: Any,
) -> OperatorCall:  # fmt: skip
    """mask: its shape; it hides most keys, and one row has none. projected: q, k and v are slices of one tensor."""

    def call(make: Make) -> Any:
        if projected:
            q, k, v = make(sq, b, (n + g) * d + g * dv, dtype=dtype).split([n * d, g * d, g * dv], dim=2)
            given = q.unflatten(2, (n, d)), k.unflatten(2, (g, d)), v.unflatten(2, (g, dv))
        else:
            given = make(sq, b, n, d, dtype=dtype), make(sk, b, g, d, dtype=dtype), make(sk, b, g, dv, dtype=dtype)
        more: dict[str, Any] = {"sink": make(n, dtype=dtype)} if sink else {}
        if mask is not None:
            hidden = (torch.arange(math.prod(mask)) * 7 % 5 < 2).view(mask)
            hidden[..., 5 % mask[-2], :] |= mask[-2] > 1
            more["mask"] = make.of(hidden)
        return operator(*given, **options, **more)

    return call


def _sink_outside(**options: Any) -> OperatorCall:
    """On a torch_npu whose operator knows nothing of a sink: our own call is its backward."""

    def call(make: Make) -> Any:
        backend = sys.modules.get("mindspeed_lite.ops.attention.npu")
        with mock.patch.object(backend, "_takes_sink", lambda: False) if backend else contextlib.nullcontext():
            return _attention(sink=True, **options)(make)

    return call


class Blocks(torch.autograd.Function):
    """What a ring does on rank 1 of 2 (`mindspeed_lite.parallel.context`), with one rank's keys for both."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.blocks = blocks.RankBlocks(zigzag(2 * len(q), 2), 1, (-1, 0), 0.3, False)
        partial = blocks.Partial.of(q, v)
        for owner in (1, 0):
            ctx.blocks.forward(q, k, v, owner, partial)
        out, lse = partial.out.to(q.dtype), partial.lse
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        sums = blocks.Sums(*map(blocks.zero_sum, (q, k, v)))
        for owner in (0, 1):
            ctx.blocks.backward(dout, q, k, v, out, lse, owner, sums)
        return tuple(total.to(t.dtype) for total, t in zip(sums, (q, k, v), strict=True))


def _in_parts(dtype: str = "bfloat16", g: int = 4, dv: int = 64) -> OperatorCall:
    """Forward and backward are calls of their own, handed the output and the log-sum-exp over all keys."""

    def call(make: Make) -> Any:
        found: torch.Tensor = Blocks.apply(  # type: ignore[no-untyped-call]
            make(24, 2, 4, 64, dtype=dtype), make(24, 2, g, 64, dtype=dtype), make(24, 2, g, dv, dtype=dtype)
        )
        return found

    return call


def _pack(keys: tuple[int, ...] = (10, 3, 11), g: int = 4, dv: int = 64, **options: Any) -> OperatorCall:
    def call(make: Make) -> Any:
        given = make(24, 4, 64), make(sum(keys), g, 64), make(sum(keys), g, dv)
        ends = ([0, *itertools.accumulate(lengths)] for lengths in ((10, 3, 11), keys))
        return packed.attention(*given, packed.Packing.of(*ends), **options)

    return call


CALLS = {
    "plain": _attention(),
    "causal, more keys than queries": _attention(sk=40, causal=True),
    "causal, one query and one key": _attention(1, 1, causal=True),
    "more keys than queries than the triangle has": _attention(256, 2304, 1, 1, 1, 16, 16, causal=True),
    "more queries than keys": _attention(sk=16),
    "two-sided window": _attention(window=(3, 6)),
    "window open to the right, more queries than keys": _attention(sk=16, window=(20, -1)),
    "window open to the left": _attention(window=(-1, 2)),
    "causal and window": _attention(causal=True, window=(4, 9)),
    "mask per head": _attention(mask=(1, 4, 24, 24)),
    "mask per batch and head": _attention(mask=(2, 4, 24, 24)),
    "mask of keys": _attention(mask=(2, 1, 1, 24)),
    "mask, more keys than queries": _attention(sk=40, mask=(2, 1, 24, 40)),
    "mask and causal": _attention(mask=(2, 1, 24, 24), causal=True),
    "mask and window": _attention(mask=(2, 4, 24, 24), window=(3, 1)),
    "one key head": _attention(g=1, causal=True, scale=0.3),
    "smaller values": _attention(dv=32, causal=True),
    "larger values": _attention(dv=128, causal=True),
    "dropout": _attention(causal=True, dropout_p=0.1),
    "float16": _attention(dtype="float16", causal=True),
    "projected": _attention(projected=True, causal=True),
    "sink": _attention(g=2, sink=True, causal=True),
    "sink and mask": _attention(mask=(2, 1, 24, 24), sink=True, scale=0.3),
    "sink and window, smaller values": _attention(dv=32, sink=True, window=(5, 0)),
    "sink and one mask for all": _attention(mask=(1, 1, 24, 24), sink=True),
    "sink outside": _sink_outside(g=2, causal=True),
    "sink outside and mask": _sink_outside(mask=(2, 1, 24, 24), scale=0.3),
    "sink outside and window, smaller values": _sink_outside(dv=32, window=(5, 0)),
    "in parts": _in_parts(),
    "in parts, float32, groups and smaller values": _in_parts("float32", 2, 32),
    "pack": _pack(causal=True),
    "pack, groups and smaller values": _pack(g=2, dv=32, causal=True),
    "pack, keys of other lengths": _pack((12, 3, 15), causal=True),
    "pack with dropout": _pack(causal=True, dropout_p=0.1),
}


class Sizes(NamedTuple):
    """Of one attention call. In layout TND b is 1 and the lengths are totals."""

    b: int
    sq: int
    sk: int
    n: int
    g: int
    d: int
    dv: int


def sizes_of(call: Call) -> Sizes | str:
    """The sizes of an attention call by its layout and head_num, or why they make no sense."""
    a = call.arguments
    q, k, v, n, layout = (a[name] for name in ("query", "key", "value", "head_num", "input_layout"))
    if layout not in LAYOUTS:
        return f"input_layout is {layout!r}: want one of {', '.join(LAYOUTS)}"
    for name, t in (("query", q), ("key", k), ("value", v)):
        if t.dim != len(layout):
            return f"{name} is {t}: layout {layout} has {len(layout)} dimensions"
    if type(n) is not int or n < 1:
        return f"head_num is {n!r}: want the number of query heads on this rank, a Python int"
    if layout in ("SBH", "BSH"):
        if q.shape[2] % n:
            return f"head_num {n} does not divide the last dimension of query {q}"
        d = q.shape[2] // n
        g, left = divmod(k.shape[2], d)
        if left or not g or v.shape[2] % g:
            return f"key {k} and value {v} do not consist of heads of size {d} (query {q} over {n} heads)"
        dv = v.shape[2] // g
        s, b = (0, 1) if layout == "SBH" else (1, 0)
    else:
        s, b, heads = {"BSND": (1, 0, 2), "BNSD": (2, 0, 1), "TND": (0, None, 1)}[layout]
        if q.shape[heads] != n:
            return f"head_num is {n} and query {q} has {q.shape[heads]} heads"
        if k.shape[heads] != v.shape[heads] or k.shape[-1] != q.shape[-1]:
            return f"query {q}, key {k} and value {v} do not fit each other"
        g, d, dv = k.shape[heads], q.shape[-1], v.shape[-1]
    if b is not None and not q.shape[b] == k.shape[b] == v.shape[b]:
        return f"query {q}, key {k} and value {v} differ in batch (layout {layout})"
    if k.shape[s] != v.shape[s]:
        return f"key {k} and value {v} differ in length (layout {layout})"
    return Sizes(1 if b is None else q.shape[b], q.shape[s], k.shape[s], n, g, d, dv)


# ---- what is documented ----


def fusion_attention(call: Call) -> Iterator[str]:
    """npu_fusion_attention(query, key, value, head_num, input_layout, ...) -> out, max, sum, softmax_in, 3 ints"""
    a = call.arguments
    yield from by_name(call, "head_num", "input_layout", "scale", "keep_prob")
    yield from _inputs(call)
    sizes = sizes_of(call)
    if isinstance(sizes, str):
        yield sizes
        return
    yield from _sizes(sizes)
    yield from _mask(call, sizes)
    yield from _lengths(call)
    if (sink := a.get("sink")) is not None:
        yield from is_tensor("sink", sink, "float32", (sizes.n,))
        if a["input_layout"] == "TND":
            yield "a sink has no contract yet in layout TND"
    if call.results is not None:
        yield from is_tensor("result 0 (out)", call.results[0], a["query"].dtype, _output(call, sizes))
        for position, name in ((1, "softmax_max"), (2, "softmax_sum")):
            yield from is_tensor(
                f"result {position} ({name})", call.results[position], "float32", _statistic(call, sizes)
            )


def fusion_attention_grad(call: Call) -> Iterator[str]:
    """npu_fusion_attention_grad(query, key, value, dy, head_num, ..., softmax_max, softmax_sum, attention_in)"""
    a = call.arguments
    yield from _inputs(call)
    sizes = sizes_of(call)
    if isinstance(sizes, str):
        yield sizes
        return
    yield from _sizes(sizes)
    yield from _mask(call, sizes)
    yield from _lengths(call)
    for name in ("softmax_max", "softmax_sum"):
        yield from is_tensor(name, a[name], "float32", _statistic(call, sizes))
    for name in ("dy", "attention_in"):
        yield from is_tensor(name, a[name], a["query"].dtype, _output(call, sizes))
    for position, name in enumerate(("query", "key", "value")):
        if call.results is not None:
            yield from is_tensor(f"gradient of {name}", call.results[position], a[name].dtype, a[name].shape)


def _inputs(call: Call) -> Iterator[str]:
    tensors = [call.arguments[name] for name in ("query", "key", "value")]
    if len({t.dtype for t in tensors}) > 1 or tensors[0].dtype not in DTYPES:
        yield f"query, key and value are {', '.join(t.dtype for t in tensors)}: want one of {', '.join(DTYPES)} for all"
    keep = call.arguments["keep_prob"]
    if not 0.0 < keep <= 1.0:
        yield f"keep_prob is {keep}: want the probability to keep, in (0, 1]"


def _sizes(sizes: Sizes) -> Iterator[str]:
    if sizes.g < 1 or sizes.n % sizes.g:
        yield f"{sizes.g} key heads do not divide {sizes.n} query heads"
    if sizes.n > 256:
        yield f"{sizes.n} heads: at most 256"
    if sizes.d > 768:
        yield f"head size {sizes.d}: at most 768"
    if sizes.dv > sizes.d:
        yield f"value heads ({sizes.dv}) are larger than key heads ({sizes.d})"


def _mask(call: Call, sizes: Sizes) -> Iterator[str]:
    a = call.arguments
    mask, mode = a["atten_mask"], a["sparse_mode"]
    tokens = (a["pre_tockens"], a["next_tockens"])
    if mode not in (FULL_TOKENS, FULL_MASK, *COMPRESSED):
        yield f"sparse_mode {mode} has no contract yet (0 to 4 have)"
        return
    if mask is None:
        # Documented: without a mask neither the mode nor the tokens count.
        if mode != FULL_TOKENS or tokens != (UNLIMITED, UNLIMITED):
            yield f"sparse_mode {mode} and tokens {tokens} mean nothing without atten_mask"
        return
    if mask.dtype not in ("bool", "uint8"):
        yield f"atten_mask is {mask.dtype}: want bool or uint8, True where a key is hidden"
    b, sq, sk, n = sizes.b, sizes.sq, sizes.sk, sizes.n
    if mode in COMPRESSED:
        if mask.shape != TRIANGLE:
            yield f"atten_mask is {list(mask.shape)}: sparse_mode {mode} takes the compressed mask, {list(TRIANGLE)}"
        elif mask.content == "other":
            yield f"atten_mask is not the triangle that sparse_mode {mode} takes, True above the diagonal"
    elif a["input_layout"] == "TND":
        yield f"sparse_mode {mode} with atten_mask has no contract yet in layout TND"
    else:
        allowed = [(b, n, sq, sk), (b, 1, sq, sk), (1, 1, sq, sk), (sq, sk)]
        if mask.shape not in allowed:
            yield f"atten_mask is {list(mask.shape)}: want one of {', '.join(str(list(shape)) for shape in allowed)}"
    if mode in (FULL_MASK, UPPER_LEFT, LOWER_RIGHT) and tokens != (UNLIMITED, UNLIMITED):
        yield f"tokens {tokens} mean nothing in sparse_mode {mode}"
    if mode in (FULL_TOKENS, BAND) and sum(tokens) < 0:
        yield f"pre_tockens {tokens[0]} and next_tockens {tokens[1]} leave no key"


def _lengths(call: Call) -> Iterator[str]:
    a = call.arguments
    names = (("actual_seq_qlen", "query"), ("actual_seq_kvlen", "key"))
    if a["input_layout"] != "TND":
        for name, _ in names:
            if a[name]:
                yield f"{name} belongs to layout TND, not to {a['input_layout']}"
        return
    for name, tensor in names:
        yield from cumulative_ends(name, a[name], a[tensor].shape[0])
        if a[name] and len(set(a[name])) < len(a[name]):
            yield f"{name} {a[name]}: what becomes of a sequence without rows is not documented"
    counts = {len(a[name]) for name, _ in names if isinstance(a[name], (list, tuple))}
    if len(counts) > 1:
        yield "actual_seq_qlen and actual_seq_kvlen differ in length"


def _output(call: Call, sizes: Sizes) -> tuple[int, ...]:
    flat = call.arguments["input_layout"] in ("SBH", "BSH")
    return (*call.arguments["query"].shape[:-1], sizes.n * sizes.dv if flat else sizes.dv)


def _statistic(call: Call, sizes: Sizes) -> tuple[int, ...]:
    if call.arguments["input_layout"] == "TND":
        return (sizes.sq, sizes.n, LANES)
    return (sizes.b, sizes.n, sizes.sq, LANES)


CONTRACTS = {"npu_fusion_attention": fusion_attention, "npu_fusion_attention_grad": fusion_attention_grad}
