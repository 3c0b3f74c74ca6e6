"""masked_softmax: against the steps one by one, as Megatron's local attention computes them.

Counted as bytes: forward reads the visible scores and writes all probabilities; backward reads the visible scores and
their probabilities' gradients and writes all gradients; both read the mask, where there is one. Under the causal mask
what lies right of the diagonal counts as not visible; a mask that is a tensor has to be read to know, and then all of
it counts as visible. What there is per row is left out. Counted as operations on each visible score: 5 forward
(maximum, difference, exponential, sum, quotient), 7 backward (difference, exponential, quotient, product, sum,
difference, product). None of them is a matmul's. The scale is 1, as Megatron's is unless layers are scaled.
"""

from __future__ import annotations

import re

import torch

from mindspeed_lite.bench.operators import OURS, TORCH, Case, Contender, Work, compiled, dtype_name
from mindspeed_lite.ops.masked_softmax import masked_softmax

_PATTERN = re.compile(r"([1-9]\d*)[xX]([1-9]\d*)[xX]([1-9]\d*)[xX]([1-9]\d*)(?:,causal=([01]))?")


def shapes(device: str, quick: bool) -> list[str]:
    """This project's CPU runs with both kinds of mask, and a batch of sequences on an accelerator."""
    if quick:
        return ["1x4x128x128"]
    return ["1x16x1024x1024", "1x16x1024x1024,causal=0", "1x8x2048x2048"] if device == "cpu" else ["4x16x2048x2048"]


def case(text: str, device: str, dtype: torch.dtype) -> Case:
    """The case of `BxNxSQxSK[,causal=0|1]`."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError("want BxNxSQxSK with all at least 1 and, if wanted, causal=0|1 (1); example 1x16x1024x1024")
    batch, heads, queries, keys = (int(match[each]) for each in (1, 2, 3, 4))
    causal = match[5] != "0"
    if causal and queries != keys:
        raise ValueError(f"a causal mask wants as many queries as keys, not {queries} and {keys}")
    if causal:
        mask = torch.ones(1, 1, queries, keys, dtype=torch.bool).triu(1)
    else:
        mask = torch.rand(batch, 1, queries, keys, generator=torch.Generator().manual_seed(2)) < 0.25
        mask[..., 0] = False  # no row is hidden whole

    def make() -> tuple[torch.Tensor, ...]:
        scores = 2 * torch.randn(batch, heads, queries, keys, generator=torch.Generator().manual_seed(1))
        return (scores.to(device, dtype).requires_grad_(),)

    def hidden(scores: torch.Tensor) -> torch.Tensor:
        nonlocal mask
        if mask.device != scores.device:
            mask = mask.to(scores.device)
        return mask

    def ours(scores: torch.Tensor) -> torch.Tensor:
        return masked_softmax(scores, causal=True) if causal else masked_softmax(scores, hidden(scores))

    def plain(scores: torch.Tensor) -> torch.Tensor:
        if dtype.itemsize > 2:
            return scores.masked_fill(hidden(scores), -10000.0).softmax(-1)
        return scores.float().masked_fill_(hidden(scores), -10000.0).softmax(-1).to(dtype)

    size, whole = dtype.itemsize, batch * heads * queries * keys
    visible = batch * heads * queries * (queries + 1) // 2 if causal else whole
    read = 0 if causal else mask.numel()
    forward = Work((visible + whole) * size + read, 5 * visible)
    backward = Work((2 * visible + whole) * size + read, 7 * visible)
    return Case(
        operator="masked_softmax",
        name=f"{batch}x{heads}x{queries}x{keys}{'' if causal else ',causal=0'} {dtype_name(dtype)}",
        device=device,
        dtype=dtype,
        make=make,
        forward=forward,
        both=Work(forward.bytes + backward.bytes, forward.flops + backward.flops),
        contenders=(Contender(OURS, lambda: ours), Contender(TORCH, lambda: plain), compiled(lambda: plain)),
    )
