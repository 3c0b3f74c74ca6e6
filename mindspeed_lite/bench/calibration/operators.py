"""The operators that are timed, at several shapes: what Megatron runs, and this project's operators in their place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from mindspeed_lite.ops import activation, adamw, attention, cross_entropy, grouped_matmul, rms_norm, rope

Run = Callable[[], object]
# [rows, inner, columns]: tall and flat, small and large, up to what a CPU does in a few milliseconds.
PRODUCTS = (
    (64, 128, 128), (256, 128, 384), (256, 384, 128), (256, 256, 256), (512, 256, 1024), (512, 1024, 256),
    (1024, 512, 512), (512, 512, 2048), (1024, 1024, 1024), (256, 1024, 4096),
)  # fmt: skip
GROUPED = ((32, 128, 256), (64, 256, 256), (128, 256, 512), (256, 512, 512))
# (keys, size of a head); with 4 heads.
ATTENTION = ((128, 32), (256, 64), (512, 64), (1024, 64), (1024, 32))
NUMBERS = (1 << 14, 1 << 17, 1 << 20)
PARAMETERS = (1 << 16, 1 << 19, 1 << 22)
WIDTH = 256


@dataclass(frozen=True)
class Case:
    """What is timed: `key` and `shape` as `planner.calibrated` reads them, and units of work of one call."""

    key: tuple[str, ...]
    shape: tuple[float, ...]
    work: float
    run: Run


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """All of them for one dtype of the model, each made when it is asked for."""
    width = str(dtype.itemsize)
    yield from _products(dtype, width)
    yield from _grouped(dtype, width)
    yield from _attention(dtype, width)
    for numbers in NUMBERS:
        for name, key, make in _vectors(dtype, numbers):
            forward, backward = make()
            yield Case((name, key, "forward", width), (numbers,), numbers, forward)
            if backward is not None:
                yield Case((name, key, "backward", width), (numbers,), numbers, backward)
        main, gradient = torch.zeros(numbers), torch.ones(numbers, dtype=dtype)
        yield Case(
            ("accumulate", "plain", "backward", width), (numbers,), numbers, functools.partial(main.add_, gradient)
        )


def optimizers() -> Iterator[Case]:
    """Adam's step on fp32 main parameters: torch's, and this project's."""
    for count in PARAMETERS:
        pieces = [torch.randn(count // 8, requires_grad=True) for _ in range(8)]
        for each in pieces:
            each.grad = torch.randn_like(each)
        narrow = [torch.empty_like(each, dtype=torch.bfloat16) for each in pieces]
        adam = torch.optim.AdamW(pieces, lr=1e-4)

        def plain(pieces: Any = pieces, narrow: Any = narrow, adam: Any = adam) -> None:
            torch.nn.utils.clip_grad_norm_(pieces, 1e9)
            adam.step()
            for main, weight in zip(pieces, narrow, strict=True):
                weight.copy_(main.detach())

        moments = [[torch.zeros_like(each) for each in pieces] for _ in range(2)]

        def fused(pieces: Any = pieces, narrow: Any = narrow, moments: Any = moments) -> None:
            torch.nn.utils.clip_grad_norm_(pieces, 1e9)
            with torch.no_grad():
                adamw.adamw(
                    pieces, [each.grad for each in pieces], *moments, lr=1e-4, betas=(0.9, 0.999), eps=1e-8,
                    weight_decay=0.01, step=3, outs=narrow,
                )  # fmt: skip

        yield Case(("optimizer", "plain"), (count,), count, plain)
        yield Case(("optimizer", "fused"), (count,), count, fused)


def _products(dtype: torch.dtype, width: str) -> Iterator[Case]:
    for shape in PRODUCTS:
        rows, inner, columns = shape
        x, weight, dy = _random(dtype, (rows, inner), (columns, inner), (rows, columns))
        flops = 2.0 * rows * inner * columns
        runs: dict[str, Run] = {
            "forward": functools.partial(torch.matmul, x, weight.t()),
            "input_grad": functools.partial(torch.matmul, dy, weight),
            "weight_grad": functools.partial(torch.matmul, dy.t(), x),
        }
        for direction, run in runs.items():
            yield Case(("product", direction, width), shape, flops, run)


def _grouped(dtype: torch.dtype, width: str) -> Iterator[Case]:
    experts = 4
    for shape in GROUPED:
        rows, inner, columns = shape
        counts = torch.tensor([rows] * experts)
        x, dy = _random(dtype, (rows * experts, inner), (rows * experts, columns))
        weights = _random(dtype, *[(columns, inner)] * experts)
        flops = 2.0 * rows * experts * inner * columns
        runs: dict[str, Run] = {
            "forward": functools.partial(grouped_matmul.grouped_matmul, x, weights, counts),
            "input_grad": functools.partial(grouped_matmul.grouped_matmul, dy, weights, counts, transposed=False),
            "weight_grad": functools.partial(grouped_matmul.weight_gradients, dy, x, counts),
        }
        for direction, run in runs.items():
            yield Case(("grouped", direction, width), shape, flops, run)


def _attention(dtype: torch.dtype, width: str) -> Iterator[Case]:
    heads, batch = 4, 1
    for keys, size in ATTENTION:
        q, k, v = (each.requires_grad_() for each in _random(dtype, *[(keys, batch, heads, size)] * 3))
        flops = 2.0 * batch * keys * keys * heads * 2 * size
        mask = torch.ones(keys, keys, dtype=torch.bool).triu(1)

        def scores(q: Any = q, k: Any = k, v: Any = v, mask: Any = mask) -> torch.Tensor:
            one, two, three = (each.squeeze(1).transpose(0, 1) for each in (q, k, v))
            found = torch.baddbmm(torch.empty(1, 1, 1, dtype=q.dtype), one, two.transpose(1, 2), beta=0.0, alpha=0.1)
            probabilities = torch.softmax(found.masked_fill(mask, -10000.0).float(), -1).to(q.dtype)
            return torch.bmm(probabilities, three).transpose(0, 1).contiguous()

        def flash(q: Any = q, k: Any = k, v: Any = v) -> Any:
            return attention.attention(q, k, v, causal=True)

        for key, run in (("scores", scores), ("flash", flash)):
            forward, backward = _both(run, (q, k, v))
            yield Case((key, "forward", width), (keys, size), flops, forward)
            yield Case((key, "backward", width), (keys, size), flops, backward)


def _vectors(dtype: torch.dtype, numbers: int) -> Iterator[tuple[str, str, Callable[[], tuple[Run, Run | None]]]]:
    rows = numbers // WIDTH

    def norm(is_fused: bool) -> tuple[Run, Run]:
        x, weight = (each.requires_grad_() for each in _random(dtype, (rows, WIDTH), (WIDTH,)))
        return _both(
            lambda: rms_norm.rms_norm(x, weight) if is_fused else F.rms_norm(x, (WIDTH,), weight, 1e-5), (x, weight)
        )

    def residual() -> tuple[Run, Run]:
        x, other = (each.requires_grad_() for each in _random(dtype, (rows, WIDTH), (rows, WIDTH)))
        return _both(lambda: other + F.dropout(x, 0.0, True), (x, other))

    def gate(is_fused: bool) -> tuple[Run, Run]:
        (x,) = (each.requires_grad_() for each in _random(dtype, (rows, 2 * WIDTH)))

        def plain() -> torch.Tensor:
            one, two = torch.chunk(x, 2, -1)
            return F.silu(one) * two

        return _both((lambda: activation.activation(x, "swiglu")) if is_fused else plain, (x,))

    def rotate(is_fused: bool) -> tuple[Run, Run]:
        size, heads = 32, 8
        (x,) = (each.requires_grad_() for each in _random(dtype, (rows, 1, heads, size)))
        cos, sin = _random(dtype, *[(rows, 1, 1, size)] * 2)

        def plain() -> torch.Tensor:
            one, two = torch.chunk(x, 2, -1)
            return x * cos + torch.cat((-two, one), -1) * sin

        return _both((lambda: rope.rope(x, cos, sin)) if is_fused else plain, (x,))

    def loss(is_fused: bool) -> tuple[Run, Run]:
        wide = 2048
        count = max(1, numbers // wide)
        (logits,) = (each.requires_grad_() for each in _random(dtype, (count, wide)))
        target = torch.randint(0, wide, (count,))

        def plain() -> torch.Tensor:
            # As Megatron's: fp32, shifted by the maximum, the exponentials kept.
            found = logits.float()
            found = found - found.max(-1, keepdim=True)[0]
            return found.exp().sum(-1).log() - found.gather(1, target[:, None])[:, 0]

        return _both((lambda: cross_entropy.cross_entropy(logits, target)) if is_fused else plain, (logits,))

    def lookup() -> tuple[Run, Run | None]:
        table = _random(dtype, (2048, WIDTH))[0]
        words = torch.randint(0, 2048, (rows,))
        return lambda: F.embedding(words, table), None

    def order() -> tuple[Run, Run]:
        (x,) = (each.requires_grad_() for each in _random(dtype, (rows, WIDTH)))
        places = torch.randperm(rows)
        return _both(lambda: x.index_select(0, places), (x,))

    def route() -> tuple[Run, Run]:
        (logits,) = (each.requires_grad_() for each in _random(torch.float32, (max(2, numbers // 8), 8)))

        def plain() -> torch.Tensor:
            best, where = torch.topk(logits, 2, dim=1)
            return torch.zeros_like(logits).scatter(1, where, torch.softmax(best, -1))

        return _both(plain, (logits,))

    def copy() -> tuple[Run, Run]:
        (x,) = (each.requires_grad_() for each in _random(dtype, (WIDTH, rows)))
        return _both(lambda: x.t().contiguous(), (x,))

    for name, make in {"norm": norm, "activation": gate, "rope": rotate, "loss": loss}.items():
        yield name, "plain", functools.partial(make, False)
        yield name, "fused", functools.partial(make, True)
    for name, alone in {
        "residual": residual, "embedding": lookup, "permute": order, "router": route, "latent": copy,
    }.items():  # fmt: skip
        yield name, "plain", alone


def _both(forward: Callable[[], Any], inputs: tuple[torch.Tensor, ...]) -> tuple[Run, Run]:
    """The forward pass, and the backward pass of one that is kept."""
    output = forward()
    gradient = torch.randn_like(output)
    return forward, lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)


def _random(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape).to(dtype) for shape in shapes]


__all__ = ["Case", "cases", "optimizers"]
