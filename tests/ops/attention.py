"""Inputs of the attention operator, its calls, and how far its backward pass may be off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mindspeed_lite.ops.attention import prepare
from mindspeed_lite.ops.attention import reference as definition


def make(
    sq: int,
    sk: int,
    b: int,
    n: int,
    g: int,
    d: int,
    dv: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """(q, k, v) and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((sq, b, n, d), (sk, b, g, d), (sk, b, g, dv), (sq, b, n, dv))
    q, k, v, dout = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return (q, k, v), dout


def slack(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, scale: float) -> float:
    """What a probability may be off because the backward pass rebuilds it as exp(score - log-sum-exp).

    The log-sum-exp is kept in fp32 and so rounded by half a unit in its last place, where the plain path
    keeps the probabilities themselves.
    """
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("sbnd,tbnd->bnst", q.double(), k.double()) * scale
    if mask is not None:
        scores = scores.masked_fill(mask, -10000.0)
    return scores.logsumexp(-1).abs().max().item() * torch.finfo(torch.float32).eps / 2


def term_sizes(inputs: Sequence[torch.Tensor], dout: torch.Tensor, options: dict[str, Any]) -> list[float]:
    """Of out, dq, dk and dv: the root of the sum of the squares of the terms that each element is a sum of.

    Roundings of terms are independent, and add up to as much of this, however the terms cancel.
    """
    q, k, v = (each.detach().double() for each in inputs)
    spec = prepare(q, k, v, **options)
    out = definition.attention(q, k, v, spec)
    ratio, given = q.shape[2] // k.shape[2], dout.double()
    keys, values = (t.repeat_interleave(ratio, dim=2) for t in (k, v))
    scores, empty = definition._scores(q, k, spec)
    lse = scores.logsumexp(-1)
    if spec.sink is not None:
        lse = torch.logaddexp(lse, spec.sink.detach().double().unsqueeze(-1))
    probs = (scores - lse.unsqueeze(-1)).exp()
    if empty is not None:
        probs = probs.masked_fill(empty, 0.0)
    dprobs = torch.einsum("sbnd,tbnd->bnst", given, values)
    delta = (given * out).sum(-1).permute(1, 2, 0).unsqueeze(-1)
    # What the backward pass reads of the output has been rounded, by as much for all keys of a row.
    common = (given * out).square().sum(-1).permute(1, 2, 0).unsqueeze(-1)
    own = probs.square() * (dprobs.square() + delta.square())
    squares = {
        "out": torch.einsum("bnst,tbnd->sbnd", probs.square(), values.square()),
        "dq": torch.einsum("bnst,tbnd->sbnd", own, keys.square())
        + common.permute(2, 0, 1, 3) * torch.einsum("bnst,tbnd->sbnd", probs, keys.abs()).square(),
        "dk": torch.einsum("bnst,sbnd->tbnd", own + probs.square() * common, q.square()),
        "dv": torch.einsum("bnst,sbnd->tbnd", probs.square(), given.square()),
    }
    factors = {"dq": spec.scale, "dk": spec.scale}
    return [factors.get(name, 1.0) * each.sum().sqrt().item() for name, each in squares.items()]


NAMES = ("out", "dq", "dk", "dv", "dsink")
