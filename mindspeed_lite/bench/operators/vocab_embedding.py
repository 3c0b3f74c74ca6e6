"""vocab_embedding: against an embedding with assignments to masked positions, as Megatron has it.

The slice is one of four, so that three ids of four are masked. Counted as bytes: forward reads a row for each id that
is here and writes one for each; backward reads the output's gradient and writes the weight's. No arithmetic worth the
name but the sums of the gradient.

With `main=1` the slice is the whole vocabulary, and the case is what a micro-batch does to it: the lookup, the gradient
for a given one of the output, and its addition to an fp32 main gradient. Counted as bytes: a row read and one written
for each id, the output's gradient read, and as many rows of the main gradient read and written.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from mindspeed_lite.bench.operators import OURS, TORCH, Case, Contender, Work, compiled, dtype_name
from mindspeed_lite.ops.vocab_embedding import vocab_embedding

SLICES = 4


def shapes(device: str, quick: bool) -> list[str]:
    """A rank's slice of vocabularies of 32k and 128k."""
    if quick:
        return ["256x256x1024"]
    if device == "cpu":
        return ["1024x1024x8192", "1024x1024x32768,main=1"]
    return ["8192x4096x8192", "8192x4096x32064", "8192x4096x128256,main=1"]


def case(text: str, device: str, dtype: torch.dtype) -> Case:
    """The case of `IDSxHIDDENxROWS`, with `,main=1` up to the main gradient."""
    match = re.fullmatch(r"([1-9]\d*)[xX]([1-9]\d*)[xX]([1-9]\d*)(,main=1)?", text)
    if match is None:
        raise ValueError("want IDSxHIDDENxROWS, each at least 1, and if wanted ,main=1: for example 1024x1024x8192")
    count, hidden, rows = (int(number) for number in match.groups()[:3])
    return (_accumulated if match[4] else _slice)(count, hidden, rows, device, dtype)


def _slice(count: int, hidden: int, rows: int, device: str, dtype: torch.dtype) -> Case:
    tokens = _tokens(count, SLICES * rows)

    def make() -> tuple[torch.Tensor, ...]:
        weight = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(1)).to(device, dtype)
        return (weight.requires_grad_(),)

    def assigned(weight: torch.Tensor) -> torch.Tensor:
        """What Megatron writes."""
        mask = (tokens(weight) < rows) | (tokens(weight) >= 2 * rows)
        local = tokens(weight).clone() - rows
        local[mask] = 0
        out = torch.nn.functional.embedding(local, weight)
        out[mask, :] = 0.0
        return out

    size = dtype.itemsize
    forward = Work((count + count // SLICES) * hidden * size, 0)
    backward = Work((count + rows) * hidden * size, count * hidden)
    return Case(
        operator="vocab_embedding",
        name=f"{count}x{hidden}x{rows} {dtype_name(dtype)}",
        device=device,
        dtype=dtype,
        make=make,
        forward=forward,
        both=Work(forward.bytes + backward.bytes, backward.flops),
        contenders=(
            Contender(OURS, lambda: lambda weight: vocab_embedding(tokens(weight), weight, rows)),
            Contender(TORCH, lambda: assigned),
            compiled(lambda: assigned),
        ),
    )


def _tokens(count: int, bound: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Ids below `bound`, always the same, on the device of the weight that is looked up."""
    ids = torch.randint(0, bound, (count,), generator=torch.Generator().manual_seed(2))

    def tokens(weight: torch.Tensor) -> torch.Tensor:
        nonlocal ids
        if ids.device != weight.device:
            ids = ids.to(weight.device)
        return ids

    return tokens


def _accumulated(count: int, hidden: int, rows: int, device: str, dtype: torch.dtype) -> Case:
    tokens = _tokens(count, rows)
    main_dtype = torch.promote_types(dtype, torch.float32)

    def make() -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        weight, dy = (torch.randn(size, hidden, generator=generator).to(device, dtype) for size in (rows, count))
        return weight, dy, torch.zeros(rows, hidden, dtype=main_dtype, device=device)

    def ours(weight: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> torch.Tensor:
        leaf = weight.detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(vocab_embedding(tokens(leaf), leaf, sparse=True), dy)
        assert leaf.grad is not None
        return main_grad.add_(leaf.grad)

    def dense(weight: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> torch.Tensor:
        """What autograd and a gradient hook do, and what a compiler can be shown of it."""
        ids = tokens(weight)
        out = torch.nn.functional.embedding(ids, weight)
        gradient: torch.Tensor = torch.ops.aten.embedding_dense_backward(dy.view_as(out), ids, rows, -1, False)
        return main_grad.add_(gradient)

    moved = count * hidden * (3 * dtype.itemsize + 2 * main_dtype.itemsize)
    return Case(
        operator="vocab_embedding",
        name=f"{count}x{hidden}x{rows} main {dtype_name(dtype)}",
        device=device,
        dtype=dtype,
        make=make,
        forward=Work(moved, count * hidden),
        both=None,
        contenders=(
            Contender(OURS, lambda: ours),
            Contender(TORCH, lambda: dense),
            compiled(lambda: dense),
        ),
    )
