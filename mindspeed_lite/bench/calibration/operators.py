"""Operators that a calibration times: Megatron's and this package's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_lite.ops import activation, adamw, attention, cross_entropy, grouped_matmul, rms_norm, rope

Run = Callable[[], object]
# (rows, inner, columns), up to a few milliseconds on a CPU core.
MATMULS = (
    (64, 128, 128), (256, 128, 384), (256, 384, 128), (256, 256, 256), (512, 256, 1024), (512, 1024, 256),
    (1024, 512, 512), (512, 512, 2048), (1024, 1024, 1024), (256, 1024, 4096),
)  # fmt: skip
EXPERTS = 4
EXPERT_MATMULS = ((32, 128, 256), (64, 256, 256), (128, 256, 512), (256, 512, 512))
HEADS = 4
# (sequence, head size)
ATTENTION = ((128, 32), (256, 64), (512, 64), (1024, 64), (1024, 32))
ELEMENTS = (1 << 14, 1 << 17, 1 << 20)
PARAMETERS = (1 << 16, 1 << 19, 1 << 22)
HIDDEN, VOCABULARY = 256, 2048


# Key, shape and work (per call) as in `planner.calibrated`, and the call.
OperatorCase = tuple[tuple[str, ...], tuple[float, ...], float, Run]


def cases() -> Iterator[OperatorCase]:
    for dtype in (torch.bfloat16, torch.float32):
        for key, *others in chain(_matmuls(dtype), _attention(dtype), _vector_operators(dtype)):
            yield ((*key, str(dtype.itemsize)), *others)  # type: ignore[misc]
    for count in PARAMETERS:
        for name, run in _optimizers(count).items():
            yield ("optimizer", name), (count,), count, run


def _matmuls(dtype: torch.dtype) -> Iterator[OperatorCase]:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    def of(name: str, shape: tuple[int, int, int], experts: int, *runs: Run) -> Iterator[OperatorCase]:
        for direction, run in zip(("forward", "input_grad", "weight_grad"), runs, strict=True):
            yield (name, direction), shape, 2.0 * math.prod(shape) * experts, run

    for shape in MATMULS:
        rows, inner, columns = shape
        x, weight, dy = random(rows, inner), random(columns, inner), random(rows, columns)
        yield from of(
            "product", shape, 1,
            partial(torch.matmul, x, weight.t()), partial(torch.matmul, dy, weight), partial(torch.matmul, dy.t(), x),
        )  # fmt: skip
    for shape in EXPERT_MATMULS:
        rows, inner, columns = shape
        counts, weights = torch.tensor([rows] * EXPERTS), [random(columns, inner) for _ in range(EXPERTS)]
        x, dy = random(rows * EXPERTS, inner), random(rows * EXPERTS, columns)
        yield from of(
            "grouped", shape, EXPERTS,
            partial(grouped_matmul.grouped_matmul, x, weights, counts),
            partial(grouped_matmul.grouped_matmul, dy, weights, counts, transposed=False),
            partial(grouped_matmul.weight_gradients, dy, x, counts),
        )  # fmt: skip


def _attention(dtype: torch.dtype) -> Iterator[OperatorCase]:
    for sequence, size in ATTENTION:
        qkv = [torch.randn(sequence, 1, HEADS, size).to(dtype).requires_grad_() for _ in range(3)]
        mask = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)

        def with_scores(mask: Tensor = mask, qkv: Sequence[Tensor] = qkv) -> Tensor:
            q, k, v = (each.squeeze(1).transpose(0, 1) for each in qkv)
            scores = torch.baddbmm(q.new_empty(1, 1, 1), q, k.transpose(1, 2), beta=0.0, alpha=0.1)
            probabilities = torch.softmax(scores.masked_fill(mask, -10000.0).float(), -1).to(q.dtype)
            return torch.bmm(probabilities, v).transpose(0, 1).contiguous()

        for name, forward in (("scores", with_scores), ("flash", partial(attention.attention, *qkv, causal=True))):
            for direction, run in _passes(forward, qkv):
                yield (name, direction), (sequence, size), 4.0 * sequence * sequence * HEADS * size, run


def _vector_operators(dtype: torch.dtype) -> Iterator[OperatorCase]:
    for count in ELEMENTS:
        for key, run in _vector_operators_of(dtype, count):
            yield key, (count,), count, run


def _vector_operators_of(dtype: torch.dtype, count: int) -> Iterator[tuple[tuple[str, ...], Run]]:
    rows = count // HIDDEN

    def random(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype).requires_grad_()

    x, y, weight = random(rows, HIDDEN), random(rows, HIDDEN), random(HIDDEN)
    gated, heads, transposed = random(rows, 2 * HIDDEN), random(rows, 1, 8, HIDDEN // 8), random(HIDDEN, rows)
    logits = random(max(1, count // VOCABULARY), VOCABULARY)
    router_logits = torch.randn(max(2, count // 8), 8, requires_grad=True)
    cos, sin = (random(rows, 1, 1, HIDDEN // 8).detach() for _ in range(2))
    table, tokens = random(VOCABULARY, HIDDEN).detach(), torch.randint(0, VOCABULARY, (rows,))
    targets, order = torch.randint(0, VOCABULARY, (len(logits),)), torch.randperm(rows)

    def swiglu() -> Tensor:
        gate, up = gated.chunk(2, -1)
        return F.silu(gate) * up

    def rotary() -> Tensor:
        one, two = heads.chunk(2, -1)
        return heads * cos + torch.cat((-two, one), -1) * sin

    def loss() -> Tensor:
        shifted = logits.float()
        shifted = shifted - shifted.max(-1, keepdim=True)[0]
        return shifted.exp().sum(-1).log() - shifted.gather(1, targets[:, None])[:, 0]

    def router() -> Tensor:
        best, experts = torch.topk(router_logits, 2, dim=1)
        return torch.zeros_like(router_logits).scatter(1, experts, torch.softmax(best, -1))

    operators: dict[str, tuple[Sequence[Tensor], Callable[[], Tensor], Callable[[], Tensor] | None]] = {
        "norm": ((x, weight), lambda: F.rms_norm(x, (HIDDEN,), weight), lambda: rms_norm.rms_norm(x, weight)),
        "activation": ((gated,), swiglu, lambda: activation.activation(gated, "swiglu")),
        "rope": ((heads,), rotary, lambda: rope.rope(heads, cos, sin)),
        "loss": ((logits,), loss, lambda: cross_entropy.cross_entropy(logits, targets)),
        "residual": ((x, y), lambda: y + F.dropout(x, 0.0, True), None),
        "embedding": ((), lambda: F.embedding(tokens, table), None),
        "permute": ((x,), lambda: x.index_select(0, order), None),
        "router": ((router_logits,), router, None),
        "latent": ((transposed,), lambda: transposed.t().contiguous(), None),
    }
    for name, (inputs, plain, fused) in operators.items():
        for kind, forward in (("plain", plain), ("fused", fused)):
            if forward is not None:
                for direction, run in _passes(forward, inputs):
                    yield (name, kind, direction), run
    yield ("accumulate", "plain", "backward"), partial(torch.zeros(count).add_, torch.ones(count, dtype=dtype))


def _passes(forward: Callable[[], Any], inputs: Sequence[Tensor]) -> Iterator[tuple[str, Run]]:
    yield "forward", forward
    if inputs:
        output = forward()
        yield "backward", partial(torch.autograd.grad, output, inputs, torch.randn_like(output), retain_graph=True)


def _optimizers(count: int) -> dict[str, Run]:
    mains = [torch.randn(count // 8, requires_grad=True) for _ in range(8)]
    gradients = [torch.randn_like(each) for each in mains]
    for main, gradient in zip(mains, gradients, strict=True):
        main.grad = gradient
    weights = [torch.empty_like(each, dtype=torch.bfloat16) for each in mains]
    moments = [[torch.zeros_like(each) for each in mains] for _ in range(2)]
    adam = torch.optim.AdamW(mains, lr=1e-4)

    def plain() -> None:
        torch.nn.utils.clip_grad_norm_(mains, 1e9)
        adam.step()
        for main, weight in zip(mains, weights, strict=True):
            weight.copy_(main.detach())

    def fused() -> None:
        torch.nn.utils.clip_grad_norm_(mains, 1e9)
        with torch.no_grad():
            adamw.adamw(
                mains, gradients, *moments, lr=1e-4, betas=(0.9, 0.999), eps=1e-8,
                weight_decay=0.01, step=3, outs=weights,
            )  # fmt: skip

    return {"plain": plain, "fused": fused}


__all__ = ["OperatorCase", "cases"]
