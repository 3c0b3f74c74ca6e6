"""Drawn calls of every operator, of which a right result can be told from a wrong one by `errors.bound`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed_lite.ops import attention as halves_of_attention
from mindspeed_lite.ops import dispatch
from mindspeed_lite.ops.accumulate_wgrad import accumulate_wgrad
from mindspeed_lite.ops.activation import KINDS, activation
from mindspeed_lite.ops.adamw import adamw, halves, moments
from mindspeed_lite.ops.attention import attention, packed, prepare
from mindspeed_lite.ops.attention.packed import Packing
from mindspeed_lite.ops.bias_dropout_add import bias_dropout_add
from mindspeed_lite.ops.cross_entropy import cross_entropy
from mindspeed_lite.ops.grouped_matmul import grouped_matmul
from mindspeed_lite.ops.layer_norm import layer_norm
from mindspeed_lite.ops.linear_cross_entropy import linear_cross_entropy
from mindspeed_lite.ops.masked_softmax import masked_softmax
from mindspeed_lite.ops.moe_router import topk_routing
from mindspeed_lite.ops.permute import permute, unpermute
from mindspeed_lite.ops.rms_norm import rms_norm
from mindspeed_lite.ops.rope import PAIRS, rope
from mindspeed_lite.ops.rope.angles import cos_sin
from mindspeed_lite.ops.vocab_embedding import vocab_embedding
from tests.harness.adamw import taken_apart


@dataclass
class Problem:
    """One drawn call.

    Attributes:
        inputs: floating tensors; the first `differentiable` of them get gradients.
        call: a function of the inputs that returns the output, or outputs by name.
        terms: length of the longest sum in any result.
        roundings: to the dtype, one after another, in any result.
        skips: results that are not compared: codes of a few bits.
        rounds_within: intermediate results are rounded to the dtype, so that results in a wider one are no more exact.
        magnitudes: the norm against which a result is measured whose terms cancel.
    """

    inputs: list[torch.Tensor]
    call: Callable[..., Any]
    terms: int
    differentiable: int = -1
    roundings: int = 1
    rounds_within: bool = False
    magnitudes: dict[str, float] = field(default_factory=dict)
    skips: tuple[str, ...] = ()


class Draw:
    """Random numbers of one case."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def size(self, least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (1,), generator=self.generator))

    def one_of(self, choices: Sequence[Any]) -> Any:
        return choices[self.size(0, len(choices) - 1)]

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype)

    def integers(self, below: int, *shape: int) -> torch.Tensor:
        return torch.randint(below, shape, generator=self.generator)


def output_gradients(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What is sent back through outputs: random numbers that every dtype has, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(t.shape, generator=generator).bfloat16().half().to(t.dtype) for t in outputs]


def draw_rms_norm(draw: Draw) -> Problem:
    rows, width = draw.size(2, 40), draw.size(8, 96)
    return Problem([draw.normal(rows, width), draw.normal(width)], rms_norm, max(rows, width))


def draw_layer_norm(draw: Draw) -> Problem:
    rows, width = draw.size(2, 40), draw.size(8, 96)
    return Problem([draw.normal(rows, width), draw.normal(width), draw.normal(width)], layer_norm, max(rows, width))


def draw_activation(draw: Draw) -> Problem:
    rows, width, kind = draw.size(8, 40), 2 * draw.size(8, 48), draw.one_of(KINDS)
    return Problem(
        [draw.normal(rows, width), draw.normal(width)], lambda x, bias: activation(x, kind, bias), max(rows, width)
    )


def draw_rope(draw: Draw) -> Problem:
    s, b, n, half = draw.size(4, 16), draw.size(1, 2), draw.size(1, 4), draw.size(4, 24)
    pairs = draw.one_of(PAIRS)
    angles = torch.arange(s)[:, None] * 100.0 ** -torch.linspace(0, 1, half)
    both = torch.stack((angles, angles), -1).flatten(-2) if pairs == "interleaved" else torch.cat((angles, angles), -1)
    cos, sin = cos_sin(both[:, None, None])
    return Problem([draw.normal(s, b, n, 2 * half)], lambda x: rope(x, cos, sin, pairs=pairs), 2)


def draw_cross_entropy(draw: Draw) -> Problem:
    rows, vocabulary = draw.size(8, 40), draw.size(16, 96)
    target = draw.integers(vocabulary, rows)
    return Problem([draw.normal(rows, vocabulary)], lambda x: cross_entropy(x * 1, target), vocabulary)


def draw_linear_cross_entropy(draw: Draw) -> Problem:
    rows, hidden, vocabulary = draw.size(8, 40), draw.size(16, 48), draw.size(16, 96)
    target = draw.integers(vocabulary, rows)
    inputs = [draw.normal(rows, hidden), (draw.normal(vocabulary, hidden) / hidden**0.5).to(draw.dtype)]
    return Problem(
        inputs,
        lambda h, w: linear_cross_entropy(h, w, target),
        vocabulary,
        roundings=2,
        rounds_within=True,
    )


def draw_grouped_matmul(draw: Draw) -> Problem:
    experts, k, n = draw.size(2, 4), draw.size(8, 40), draw.size(8, 40)
    counts = torch.tensor([draw.size(1, 20) for _ in range(experts)])
    inputs = [draw.normal(int(counts.sum()), k), *(draw.normal(n, k) for _ in range(experts))]
    return Problem(inputs, lambda x, *weights: grouped_matmul(x, weights, counts), max(k, n, 20))


def routing(draw: Draw) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A map [T, E] with as many experts for each token, probs, and that number."""
    tokens, experts, topk = draw.size(8, 40), draw.size(3, 8), draw.size(1, 3)
    ranks = torch.rand(tokens, experts, generator=draw.generator).argsort(-1)
    return ranks < topk, torch.rand(tokens, experts, generator=draw.generator) + 0.1, topk


def draw_permute(draw: Draw) -> Problem:
    routed, probs, topk = routing(draw)

    def call(tokens: torch.Tensor, probs: torch.Tensor) -> Any:
        permuted, permuted_probs, _ = permute(tokens, routed, probs, topk=topk)
        assert permuted_probs is not None
        return {"permuted": permuted, "permuted probs": permuted_probs}

    return Problem([draw.normal(len(routed), draw.size(8, 48)), probs], call, topk)


def draw_unpermute(draw: Draw) -> Problem:
    routed, probs, topk = routing(draw)
    width = draw.size(8, 48)

    def call(permuted: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        row_ids = permute(torch.zeros(len(routed), width, dtype=permuted.dtype), routed, topk=topk)[2]
        return unpermute(permuted, row_ids, (len(routed), width), probs, routed)

    # Probs may be fp32 beside 16-bit rows: some paths round the products of rows to their dtype.
    return Problem([draw.normal(len(routed) * topk, width), probs], call, width, roundings=2, rounds_within=True)


def distinct_logits(draw: Draw) -> torch.Tensor:
    """[T, E] without equal scores in a row."""
    tokens, experts = draw.size(8, 40), draw.size(4, 32)
    ranks = torch.rand(tokens, experts, generator=draw.generator).argsort(-1)
    return (ranks * (6 / experts) - 3).to(draw.dtype)


def draw_moe_router(draw: Draw) -> Problem:
    logits, topk = distinct_logits(draw), draw.size(2, 4)
    scores, pre = draw.one_of(["softmax", "sigmoid"]), draw.one_of([True, False])

    def call(logits: torch.Tensor) -> torch.Tensor:
        return topk_routing(logits, topk, score_function=scores, use_pre_softmax=pre)[0]

    return Problem([logits], call, logits.shape[-1])


def draw_masked_softmax(draw: Draw) -> Problem:
    n = draw.size(1, 3)
    sq = draw.one_of([32, 48, 64])
    causal = draw.one_of([True, False])
    return Problem([draw.normal(2, n, sq, sq)], lambda x: masked_softmax(x, causal=causal, scale=0.5), sq)


def draw_bias_dropout_add(draw: Draw) -> Problem:
    rows, width = draw.size(8, 40), draw.size(8, 96)
    inputs = [draw.normal(rows, width), draw.normal(rows, width), draw.normal(width)]
    # The reference rounds x + bias.
    return Problem(inputs, bias_dropout_add, rows, roundings=2)


def draw_dropout(draw: Draw) -> Problem:
    rows, width, p, seed = draw.size(8, 40), draw.size(8, 96), draw.one_of([0.1, 0.5]), draw.size(0, 1000)
    inputs = [draw.normal(rows, width), draw.normal(rows, width), draw.normal(width)]
    kept = torch.zeros(0)

    def call(x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        if x.dtype == torch.float64:  # what the call before has kept
            return residual + (x + bias) * kept / (1.0 - p)
        torch.manual_seed(seed)
        with torch.no_grad():
            kept = bias_dropout_add(torch.ones_like(x), torch.zeros_like(x), None, p) != 0
        torch.manual_seed(seed)
        return bias_dropout_add(x, residual, bias, p)

    # The reference rounds x + bias, and it scaled.
    return Problem(inputs, call, rows, roundings=3)


def draw_accumulate_wgrad(draw: Draw) -> Problem:
    rows, n, k = draw.size(8, 64), draw.size(8, 40), draw.size(8, 40)
    wide = draw.dtype if draw.one_of([True, False]) else torch.float32
    inputs = [draw.normal(n, k, dtype=wide), draw.normal(rows, n), draw.normal(rows, k)]
    # The reference rounds the product before it is added.
    return Problem(
        inputs,
        lambda main, dy, x: accumulate_wgrad(main.clone(), dy, x),
        rows,
        differentiable=0,
        roundings=2,
        rounds_within=True,
    )


def adamw_step(form: str) -> Callable[[Draw], Problem]:
    """A step on fp32 numbers, on such in halves, or with moments of 8 or 16 bits."""

    def problem(draw: Draw) -> Problem:
        size = draw.size(16, 400)
        param, first, second = (draw.normal(size, dtype=torch.float32) for _ in range(3))
        rule: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 3}
        second = second.square() + 0.01

        codes, blocks = [first, second], None
        if form in ("bf16", "fp8"):
            codes = [torch.empty(size, dtype=torch.bfloat16 if form == "bf16" else torch.uint8) for _ in range(2)]
            blocks = [(moments.exponents(size), moments.exponents(size))] if form == "fp8" else None
            moments.pack((first, second), *codes, blocks[0] if blocks else None, None)
            first, second = moments.unpack(*codes, blocks[0] if blocks else None)

        def call(*given: torch.Tensor) -> dict[str, torch.Tensor]:
            p, m, v, g = (t.clone() for t in given)
            if p.dtype == torch.float64 or form == "fp32":
                adamw([p], [g], [m], [v], **rule)
            elif form == "halves":
                high, low, signs = taken_apart(p)
                v.copysign_(signs)
                adamw([high], [g], [m], [v], **rule, lows=[low])
                p, v = halves.join(high, low, v), v.abs()
            else:
                own = [each.clone() for each in codes]
                pairs = blocks and [tuple(each.clone() for each in blocks[0])]
                adamw([p], [g], [own[0]], [own[1]], **rule, blocks=pairs)
                m, v = moments.unpack(*own, pairs[0] if pairs else None)
            return {"update": p.double() - given[0].double(), "exp_avg": m, "exp_avg_sq": v}

        # An update is as exact as the sum that it is taken from.
        sizes = {"update": param.double().norm().item()}
        kept = ("exp_avg", "exp_avg_sq") if form in ("bf16", "fp8") else ()
        return Problem([param, first, second, draw.normal(size)], call, 4, 0, magnitudes=sizes, skips=kept)

    return problem


def draw_vocab_embedding(draw: Draw) -> Problem:
    rows, width, count, sparse = draw.size(16, 40), draw.size(8, 24), draw.size(8, 24), draw.one_of([True, False])
    ids = draw.integers(2 * rows, count) + rows
    ids[:2] = rows  # one that is here for certain, and twice

    def call(weight: torch.Tensor) -> torch.Tensor:
        return vocab_embedding(ids, weight, rows, sparse=sparse)

    # The gradients of one row are summed in its dtype.
    return Problem([draw.normal(rows, width)], call, count, roundings=2)


def heads_and_options(draw: Draw) -> tuple[list[int], dict[str, Any]]:
    """[sq, sk, b, n, g, d, dv], and the keywords of a call."""
    ratio, g = draw.one_of([1, 2, 4]), draw.size(1, 2)
    # A first row that sees one key has no gradient of its own, which a missing block must not be alone.
    sq, sk, b, d = draw.size(16, 24), draw.size(16, 24), draw.size(1, 2), 8 * draw.size(1, 3)
    options: dict[str, Any] = draw.one_of([{}, {"causal": True}, {"window": (5, 2)}, {"causal": True, "scale": 0.2}])
    if options:
        sk = sq + draw.one_of([0, 3])
    return [sq, sk, b, ratio * g, g, d, draw.one_of([d, 8])], options


def qkv(draw: Draw, sizes: Sequence[int]) -> list[torch.Tensor]:
    sq, sk, b, n, g, d, dv = sizes
    return [draw.normal(sq, b, n, d), draw.normal(sk, b, g, d), draw.normal(sk, b, g, dv)]


def draw_attention(draw: Draw) -> Problem:
    sizes, options = heads_and_options(draw)
    sq, sk, b, *_ = sizes
    if draw.one_of([True, False]):
        options = options | {"mask": torch.rand(b, 1, sq, sk, generator=draw.generator) > 0.7}
        options["mask"][..., :2, :] = False
    # Probabilities or their gradients, the output before the backward pass reads it, and the result.
    return Problem(qkv(draw, sizes), lambda q, k, v: attention(q, k, v, **options), sk + sq, roundings=3)


def draw_attention_sink(draw: Draw) -> Problem:
    s, b, n, g, d = draw.size(16, 24), draw.size(1, 2), 32, draw.one_of([8, 16]), 8
    tensors = [*qkv(draw, [s, s, b, n, g, d, d]), draw.normal(n)]

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, causal=True, sink=sink)

    # The sink's gradient is a sum of p * dout * out of either sign, with roundings of out. They are independent, and of
    # half of their largest size or so in the mean over so many heads.
    wide = [each.double() for each in tensors]
    with dispatch.force("attention", dispatch.REFERENCE):
        out, lse = attention(*wide[:3], causal=True, sink=wide[3], return_lse=True)
    weights = (wide[3][:, None] - lse).exp().permute(2, 0, 1)[..., None]
    size = 0.6 * (weights * output_gradients([out])[0] * out).norm().item()
    return Problem(tensors, call, 2 * s, roundings=3, magnitudes={"gradient of input 4": size})


def draw_attention_halves(draw: Draw) -> Problem:
    """The two halves that context parallelism calls, over all of the keys."""
    sizes, options = heads_and_options(draw)
    dout = draw.normal(sizes[0], sizes[2], sizes[3], sizes[6])

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
        spec = prepare(q, k, v, **options)
        out, lse = halves_of_attention.forward(q, k, v, spec)
        found = halves_of_attention.backward(dout.to(q.dtype), q, k, v, out, lse, spec)
        # A row that sees nothing has the logarithm of 0.
        return {"out": out, "lse": lse.nan_to_num(neginf=0.0), **dict(zip(("dq", "dk", "dv"), found, strict=True))}

    # Some kernels take their exponentials no more exactly than the dtype needs, and so lse.
    return Problem(qkv(draw, sizes), call, sum(sizes[:2]), 0, roundings=3, rounds_within=True)


def draw_attention_dropout(draw: Draw) -> Problem:
    sizes, options = heads_and_options(draw)
    sq, sk, b, n, g, _, _ = sizes
    p, seed = draw.one_of([0.125, 0.5]), draw.size(0, 1000)  # which every kernel can draw exactly
    kept = torch.zeros(0)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        if q.dtype == torch.float64:  # what the call before has kept
            rows = torch.eye(sk, dtype=q.dtype).view(sk, 1, 1, sk).expand(sk, b, g, sk)
            weights = attention(q, k, rows, **options) * kept / (1.0 - p)
            return torch.einsum("sbnt,tbnd->sbnd", weights, v.repeat_interleave(n // g, dim=2))
        with torch.no_grad():
            rows = torch.eye(sk, dtype=q.dtype).view(sk, 1, 1, sk).expand(sk, b, g, sk)
            torch.manual_seed(seed)
            kept = attention(q, k, rows, dropout_p=p, **options) != 0
        torch.manual_seed(seed)
        return attention(q, k, v, dropout_p=p, **options)

    return Problem(qkv(draw, sizes), call, sk + sq, roundings=3)


def draw_packed_attention(draw: Draw) -> Problem:
    lengths = torch.tensor([0, *(draw.size(8, 12) for _ in range(draw.size(2, 3)))])
    layout = Packing.of(lengths.cumsum(0).tolist())
    (_, _, _, n, g, d, dv), options = heads_and_options(draw)
    rows = int(lengths.sum())
    inputs = [draw.normal(rows, n, d), draw.normal(rows, g, d), draw.normal(rows, g, dv)]
    return Problem(inputs, lambda *qkv: packed.attention(*qkv, layout, **options), rows, roundings=3)


PROBLEMS: dict[str, tuple[str, Callable[[Draw], Problem]]] = {
    "accumulate_wgrad": ("accumulate_wgrad", draw_accumulate_wgrad),
    "activation": ("activation", draw_activation),
    "adamw": ("adamw", adamw_step("fp32")),
    "adamw_bf16": ("adamw", adamw_step("bf16")),
    "adamw_fp8": ("adamw", adamw_step("fp8")),
    "adamw_halves": ("adamw", adamw_step("halves")),
    "attention": ("attention", draw_attention),
    "attention_dropout": ("attention", draw_attention_dropout),
    "attention_sink": ("attention", draw_attention_sink),
    "attention_halves": ("attention", draw_attention_halves),
    "bias_dropout_add": ("bias_dropout_add", draw_bias_dropout_add),
    "cross_entropy": ("cross_entropy", draw_cross_entropy),
    "dropout": ("bias_dropout_add", draw_dropout),
    "grouped_matmul": ("grouped_matmul", draw_grouped_matmul),
    "layer_norm": ("layer_norm", draw_layer_norm),
    "linear_cross_entropy": ("linear_cross_entropy", draw_linear_cross_entropy),
    "masked_softmax": ("masked_softmax", draw_masked_softmax),
    "moe_router": ("moe_router", draw_moe_router),
    "packed_attention": ("attention", draw_packed_attention),
    "permute": ("permute", draw_permute),
    "rms_norm": ("rms_norm", draw_rms_norm),
    "rope": ("rope", draw_rope),
    "unpermute": ("permute", draw_unpermute),
    "vocab_embedding": ("vocab_embedding", draw_vocab_embedding),
}
