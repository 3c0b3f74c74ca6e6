"""`mindspeed_lite.ops.attention` on npu_fusion_attention and npu_fusion_attention_grad."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tests.npu_contract.attention_calls import (
    BAND,
    COMPRESSED,
    FULL_MASK,
    FULL_TOKENS,
    LOWER_RIGHT,
    UNLIMITED,
    UPPER_LEFT,
    Sizes,
    sizes_of,
    visible_to,
)
from tests.npu_contract.definitions import (
    DTYPES,
    ContractCase,
    Mutation,
    Tensors,
    by_name,
    cumulative_ends,
    is_tensor,
)
from tests.npu_contract.recorder import TRIANGLE, Call, Tensor

LANES = 8

UNFUSED = ("aten::_softmax", "aten::baddbmm", "aten::bmm")


@dataclass(frozen=True)
class Attention(ContractCase):
    """`mindspeed_lite.ops.attention.attention`; mask: the leading sizes of one over [sq, sk], or all its sizes."""

    name: str
    sq: int = 24
    sk: int = 24
    b: int = 2
    n: int = 4
    g: int = 4
    d: int = 64
    dv: int = 64
    dtype: str = "bfloat16"
    causal: bool = False
    window: tuple[int, int] | None = None
    mask: tuple[int, ...] | None = None
    scale: float | None = None
    dropout: float = 0.0
    packed: bool = False

    operator = "attention"
    forward = "npu_fusion_attention"
    backward = "npu_fusion_attention_grad"
    saved = {  # noqa: RUF012
        "attention_in": 0, "softmax_max": 1, "softmax_sum": 2, "softmax_in": 3, "seed": 4, "offset": 5, "numels": 6,
    }  # fmt: skip
    renamed = {"scale": "scale_value"}  # noqa: RUF012

    def leaves(self, device: str) -> Tensors:
        dtype = getattr(torch, self.dtype)
        if self.packed:
            width = (self.n + self.g) * self.d + self.g * self.dv
            return {"qkv": torch.zeros(self.sq, self.b, width, dtype=dtype, device=device).requires_grad_()}
        shapes = {
            "q": (self.sq, self.b, self.n, self.d),
            "k": (self.sk, self.b, self.g, self.d),
            "v": (self.sk, self.b, self.g, self.dv),
        }
        return {name: torch.zeros(shape, dtype=dtype, device=device).requires_grad_() for name, shape in shapes.items()}

    def run(self, leaves: Tensors) -> torch.Tensor:
        from mindspeed_lite.ops.attention import attention

        return attention(*self._inputs(leaves), **self._options(leaves))

    def hidden(self) -> torch.Tensor | None:
        """The caller's mask, on the CPU: most keys visible, one query row without any."""
        if self.mask is None:
            return None
        count = math.prod(self.mask)
        mask = (torch.arange(count) * 7 % 5 < 2).view(self.mask)
        if self.mask[-2] > 1:
            mask[..., 5, :] = True
        return mask

    def arguments(self) -> Mapping[str, Any]:
        width = max(self.d, self.dv)
        keys = Tensor(self.dtype, (self.sk, self.b, self.g * width), "")
        given: dict[str, Any] = {
            "query": Tensor(self.dtype, (self.sq, self.b, self.n * width), ""),
            "key": keys,
            "value": keys,
            "head_num": self.n,
            "input_layout": "SBH",
            "scale": self.d**-0.5 if self.scale is None else self.scale,
            "keep_prob": 1.0 - self.dropout,
        }
        unused = ("pse", "padding_mask", "prefix", "actual_seq_qlen", "actual_seq_kvlen", "sink", "dropout_mask")
        return given | dict.fromkeys(unused)

    def result(self) -> Any:
        return Tensor(self.dtype, (self.sq, self.b, self.n, self.dv), "")

    def effect(self, call: Call) -> list[str]:
        seen = visible_to(call)
        if seen is None:
            return ["which keys are hidden is not known: the mask was recorded without its content"]
        found = []
        wanted = self.visible()
        if seen.shape[2:] != wanted.shape[2:] or not torch.equal(*torch.broadcast_tensors(seen, wanted)):
            found.append("the mask, sparse_mode and tokens hide other keys than the caller asked for")
        if not seen.any(-1).all():
            found.append("a row without visible keys is handed over: what becomes of it is not documented")
        mask = call.arguments["atten_mask"]
        if self.mask is None and mask is not None and mask.shape != TRIANGLE:
            found.append("a mask as large as the scores, where the compressed one would do")
        return found

    def visible(self) -> torch.Tensor:
        """[b, n, sq, sk]: the keys each query may see; all of them where there would be none, which is cleared."""
        query = torch.arange(self.sq)[:, None] + self.sk - self.sq
        key = torch.arange(self.sk)[None, :]
        seen = torch.ones(self.sq, self.sk, dtype=torch.bool)
        if self.causal:
            seen &= key <= query
        left, right = self.window or (-1, -1)
        if left >= 0:
            seen &= key >= query - left
        if right >= 0:
            seen &= key <= query + right
        seen = seen.expand(self.b, self.n, self.sq, self.sk)
        hidden = self.hidden()
        if hidden is not None:
            seen = seen & ~hidden
        return seen | ~seen.any(-1, keepdim=True)

    def _inputs(self, leaves: Tensors) -> tuple[torch.Tensor, ...]:
        if not self.packed:
            return leaves["q"], leaves["k"], leaves["v"]
        sizes = [self.n * self.d, self.g * self.d, self.g * self.dv]
        q, k, v = leaves["qkv"].split(sizes, dim=2)
        return q.unflatten(2, (self.n, self.d)), k.unflatten(2, (self.g, self.d)), v.unflatten(2, (self.g, self.dv))

    def _options(self, leaves: Tensors) -> dict[str, Any]:
        hidden = self.hidden()
        if hidden is not None:
            hidden = hidden.to(next(iter(leaves.values())).device)
        return {
            "causal": self.causal,
            "window": self.window,
            "mask": hidden,
            "scale": self.scale,
            "dropout_p": self.dropout,
        }


@dataclass(frozen=True)
class WithSink(Attention):
    """With a logit per head besides the keys, which the operator takes in fp32."""

    def leaves(self, device: str) -> Tensors:
        sink = torch.zeros(self.n, dtype=getattr(torch, self.dtype), device=device).requires_grad_()
        return {**super().leaves(device), "sink": sink}

    def arguments(self) -> Mapping[str, Any]:
        return {**super().arguments(), "sink": Tensor("float32", (self.n,), "")}

    def _options(self, leaves: Tensors) -> dict[str, Any]:
        return {**super()._options(leaves), "sink": leaves["sink"]}


@dataclass(frozen=True)
class SinkOutside(WithSink):
    """The same on a torch_npu whose operator knows nothing of a sink: our own call is its backward."""

    saved = {"attention_in": 0, "softmax_max": 1, "softmax_sum": 2}  # noqa: RUF012

    def run(self, leaves: Tensors) -> torch.Tensor:
        backend = importlib.import_module("mindspeed_lite.ops.attention.npu")
        takes_sink, backend._takes_sink = backend._takes_sink, lambda: False
        try:
            return super().run(leaves)
        finally:
            backend._takes_sink = takes_sink

    def arguments(self) -> Mapping[str, Any]:
        return {**super().arguments(), "sink": None}


@dataclass(frozen=True)
class Partial(Attention):
    """One rank's rows of a causal sequence on two ranks: its own block, and keys that all its queries see.

    Forward and backward are calls of their own, whose results context parallelism puts together; the backward is
    handed the output and the log-sum-exp over all keys.
    """

    causal: bool = True

    calls = 2
    saved = {"attention_in": 0, "softmax_max": 1, "softmax_sum": 2}  # noqa: RUF012

    def run(self, leaves: Tensors) -> torch.Tensor:
        out: torch.Tensor = Blocks.apply(*self._inputs(leaves), self.scale)  # type: ignore[no-untyped-call]
        return out

    def effect(self, call: Call) -> list[str]:
        if call.arguments["key"].shape[0] == self.sk:
            return super().effect(call)
        seen = visible_to(call)
        return [] if seen is not None and seen.all() else ["keys of an earlier chunk are hidden"]


class Blocks(torch.autograd.Function):
    """What a ring does on rank 1 of 2 (`mindspeed_lite.parallel.context`), with one rank's keys for both."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
        from mindspeed_lite.parallel.context import blocks, zigzag

        ctx.blocks = blocks.RankBlocks(zigzag(2 * len(q), 2), 1, (-1, 0), scale, False)
        partial = blocks.Partial.of(q, v)
        for owner in (1, 0):
            ctx.blocks.forward(q, k, v, owner, partial)
        out, lse = partial.out.to(q.dtype), partial.lse
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        from mindspeed_lite.parallel.context import blocks

        q, k, v, out, lse = ctx.saved_tensors
        sums = blocks.Sums(*map(blocks.zero_sum, (q, k, v)))
        for owner in (0, 1):
            ctx.blocks.backward(dout, q, k, v, out, lse, owner, sums)
        return *(total.to(t.dtype) for total, t in zip(sums, (q, k, v), strict=True)), None


@dataclass(frozen=True)
class Pack(Attention):
    """`mindspeed_lite.ops.attention.packed.attention`; lengths of the sequences among queries and keys."""

    queries: tuple[int, ...] = (10, 3, 11)
    keys: tuple[int, ...] = (10, 3, 11)
    b: int = 1

    def leaves(self, device: str) -> Tensors:
        return {name: t.detach().squeeze(1).requires_grad_() for name, t in super().leaves(device).items()}

    def run(self, leaves: Tensors) -> Any:
        from mindspeed_lite.ops.attention import packed

        queries, keys = ([0, *itertools.accumulate(lengths)] for lengths in (self.queries, self.keys))
        return packed.attention(
            leaves["q"],
            leaves["k"],
            leaves["v"],
            packed.Packing.of(queries, keys),
            causal=self.causal,
            scale=self.scale,
            dropout_p=self.dropout,
        )

    def arguments(self) -> Mapping[str, Any]:
        width = max(self.d, self.dv)
        keys = Tensor(self.dtype, (self.sk, self.g, width), "")
        lengths = {
            "actual_seq_qlen": list(itertools.accumulate(self.queries)),
            "actual_seq_kvlen": list(itertools.accumulate(self.keys)),
        }
        changed = {"query": Tensor(self.dtype, (self.sq, self.n, width), ""), "key": keys, "value": keys}
        mode = {"sparse_mode": LOWER_RIGHT if self.causal else FULL_TOKENS}
        return {**super().arguments(), **changed, "input_layout": "TND", **lengths, **mode}

    def result(self) -> Any:
        return Tensor(self.dtype, (self.sq, self.n, self.dv), "")

    def effect(self, call: Call) -> list[str]:
        return []


CASES = (
    Attention("plain"),
    Attention("causal", causal=True),
    Attention("causal, more keys than queries", causal=True, sk=40),
    Attention("causal, one query and one key", causal=True, sq=1, sk=1),
    Attention(
        "causal, more keys than queries, longer than the triangle",
        causal=True,
        sq=256,
        sk=2304,
        b=1,
        n=1,
        g=1,
        d=16,
        dv=16,
    ),
    Attention("more keys than queries", sk=40),
    Attention("more queries than keys", sk=16),
    Attention("window", window=(5, 0)),
    Attention("two-sided window", window=(3, 6)),
    Attention("window open to the right, more queries than keys", window=(20, -1), sk=16),
    Attention("window open to the left", window=(-1, 2)),
    Attention("causal and window", causal=True, window=(4, 9)),
    Attention("mask per batch", mask=(2, 1, 24, 24)),
    Attention("mask per head", mask=(1, 4, 24, 24)),
    Attention("mask per batch and head", mask=(2, 4, 24, 24)),
    Attention("mask of keys", mask=(2, 1, 1, 24)),
    Attention("mask, more keys than queries", mask=(2, 1, 24, 40), sk=40),
    Attention("mask and causal", mask=(2, 1, 24, 24), causal=True),
    Attention("mask and window", mask=(2, 4, 24, 24), window=(3, 1)),
    Attention("groups", g=2, causal=True),
    Attention("one key head", g=1, causal=True),
    Attention("scale", scale=0.3, causal=True),
    Attention("smaller values", dv=32, causal=True),
    Attention("larger values", dv=128, causal=True),
    Attention("heads of 192 and values of 128", d=192, dv=128, causal=True),
    Attention("dropout", dropout=0.1, causal=True),
    Attention("float16", dtype="float16", causal=True),
    Attention("float32", dtype="float32", causal=True),
    Attention("packed", packed=True, causal=True),
    WithSink("sink", causal=True, g=2),
    WithSink("sink and mask", mask=(2, 1, 24, 24), scale=0.3),
    WithSink("sink and window, smaller values", window=(5, 0), dv=32),
    WithSink("sink and dropout", dropout=0.1, causal=True, sk=40),
    WithSink("sink and one mask for all", mask=(1, 1, 24, 24)),
    SinkOutside("sink outside", causal=True, g=2),
    SinkOutside("sink outside and mask", mask=(2, 1, 24, 24), scale=0.3),
    SinkOutside("sink outside and window, smaller values", window=(5, 0), dv=32),
    Partial("partial"),
    Partial("partial, groups and smaller values", g=2, dv=32, scale=0.3),
    Partial("partial, float32", dtype="float32"),
    Pack("pack", causal=True),
    Pack("pack, groups and smaller values", g=2, dv=32, causal=True),
    Pack("pack, keys of other lengths", keys=(12, 3, 15), sk=30),
    Pack("pack with dropout", dropout=0.1, causal=True),
    Attention("longer than the triangle", sq=2304, sk=2304, b=1, n=1, g=1, d=16, dv=16, causal=True),
)


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

MUTATIONS = {
    # names
    "keyword of another operator": Mutation(
        "        scale=spec.scale,", "        softmax_scale=spec.scale,", "softmax_scale"
    ),
    "head_num by position": Mutation("        head_num=heads,\n", "        heads,\n", "head_num not passed by name"),
    # heads
    "key heads": Mutation('n, "SBH", spec', 'k.shape[2], "SBH", spec', "head_num is 2: want 4"),
    "layout of batch first": Mutation('"SBH", spec', '"BSH", spec', "input_layout is BSH: want SBH"),
    "values not padded": Mutation(
        "v.shape[3]\n    width = max(d, dv)", "v.shape[3]\n    width = d", "larger than key heads"
    ),
    # scale and dropout
    "scale left out": Mutation("        scale=spec.scale,\n", "", "scale is 1.0: want 0.125"),
    "scale of the caller ignored": Mutation('"SBH", spec', '"SBH", spec._replace(scale=d**-0.5)', "want 0.3"),
    "what to drop for what to keep": Mutation(
        "keep_prob=1.0 - spec.dropout_p", "keep_prob=spec.dropout_p", "keep_prob is 0.0"
    ),
    # masks
    "polarity of the mask": Mutation(
        "written_out = hidden.expand", "written_out = (~hidden).expand", "hide other keys than the caller asked for"
    ),
    "smaller triangle": Mutation("torch.ones(2048, 2048,", "torch.ones(1024, 1024,", "takes the compressed mask"),
    "triangle left out": Mutation(
        "_Masking(_triangle(q.device), _UPPER", "_Masking(None, _UPPER",
        "mean nothing without atten_mask",
    ),
    "mask not expanded": Mutation(
        "written_out = hidden.expand(batches, hidden.shape[1], sq, sk).contiguous()", "written_out = hidden",
        "atten_mask is [2, 1, 1, 24]"
    ),
    "mask of one batch and all heads": Mutation(
        "batches = b if hidden.shape[0] != 1 or hidden.shape[1] != 1 else 1", "batches = hidden.shape[0]",
        "atten_mask is [1, 4, 24, 24]",
    ),
    "band with a mask lost": Mutation(
        "spec.hidden(sq", "spec._replace(causal=False, window=None).hidden(sq",
        "hide other keys than the caller asked for",
    ),
    "rows without keys": Mutation(
        "batches = b if", "hidden = hidden | empty\n        batches = b if", "a row without visible keys"
    ),
    # modes
    "compressed mode with a full mask": Mutation(
        "_FULL_MASK, _UPPER_LEFT, _LOWER_RIGHT, _BAND = 1, 2", "_FULL_MASK, _UPPER_LEFT, _LOWER_RIGHT, _BAND = 2, 2",
        "takes the compressed mask",
    ),
    "upper left corner always": Mutation(
        "_UPPER_LEFT if sq == sk else _LOWER_RIGHT", "_UPPER_LEFT", "hide other keys than the caller asked for"
    ),
    "tokens exchanged": Mutation(
        "_BAND, before, after)", "_BAND, after, before)",
        "hide other keys than the caller asked for",
    ),
    # results
    "padding left in the output": Mutation("        out = out[..., :dv]\n", "        pass\n", "the output is"),
    # packs
    "leading zero in a pack": Mutation(
        "itertools.accumulate(lengths)", "itertools.accumulate(lengths, initial=0)", "leading zero"
    ),
    "causal from the first key in a pack": Mutation(
        "_LOWER_RIGHT) if spec.causal", "_UPPER_LEFT) if spec.causal", "sparse_mode is 2: want 3"
    ),
    # our own call of the backward
    "statistic of one lane": Mutation("(*t.shape, _LANES)", "(*t.shape, 1)", "softmax_max"),
    "no scale in the backward": Mutation("        scale_value=spec.scale,\n", "", "scale_value is 1.0 in the backward"),
    "key heads in the backward": Mutation("head_num=n,", "head_num=k.shape[2],", "head_num is 2 in the backward"),
    # the sink
    "sink in half precision": Mutation('"sink": spec.sink.float()', '"sink": spec.sink', "sink is bfloat16[4]"),
    "sink without a gradient": Mutation("spec.sink.float()", "spec.sink.detach().float()", "gradient of sink"),
    # gradients
    "gradient cut": Mutation(
        "return t.reshape(t.shape[0], t.shape[1], -1)", "return t.detach().reshape(t.shape[0], t.shape[1], -1)",
        "does not require grad",
    ),
}  # fmt: skip
