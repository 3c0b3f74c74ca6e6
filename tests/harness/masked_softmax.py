"""Scores and masks for the masked softmax, and Megatron's own steps."""

from __future__ import annotations

import torch

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
MASKS = ["none", "bnqk", "b1qk", "11qk", "b11k", "qk", "k", "bnq1", "1", "expanded"]
# fp32 results: as many roundings in another order, and exponentials of two units in the last place.
SLACK = 2 * torch.finfo(torch.float32).eps


def hidden(scores: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    """Where something is hidden, [b, n, sq, sk]."""
    found = torch.zeros(scores.shape, dtype=torch.bool) if mask is None else mask.expand(scores.shape).clone()
    if causal and scores.shape[-2] > 1:
        found |= torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return found


def megatron(scores: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float) -> torch.Tensor:
    """The steps of FusedScaleMaskSoftmax.forward_torch_softmax; of float64 scores, the truth."""
    wide = (scores.float() if scores.dtype.itemsize == 2 else scores) * scale
    return wide.masked_fill(hidden(scores, mask, causal), -10000.0).softmax(-1).to(scores.dtype)


def make(
    shape: tuple[int, ...], dtype: torch.dtype, kind: str = "none", seed: int = 0, size: float = 2.0
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Scores, a mask that hides about a quarter and some rows whole, and a gradient of the probabilities."""
    generator = torch.Generator().manual_seed(seed)
    b, n, q, k = shape
    scores = (size * torch.randn(shape, generator=generator)).to(dtype)
    dprobs = torch.randn(shape, generator=generator).to(dtype)
    sizes = {
        "bnqk": shape, "b1qk": (b, 1, q, k), "11qk": (1, 1, q, k), "b11k": (b, 1, 1, k), "qk": (q, k), "k": (k,),
        "bnq1": (b, n, q, 1), "1": (), "expanded": (b, 1, q, 1),
    }  # fmt: skip
    if kind == "none":
        return scores, None, dprobs
    mask = torch.rand(sizes[kind], generator=generator) < 0.25
    if kind in ("bnqk", "b1qk", "11qk", "qk"):
        mask[..., q // 2 : q // 2 + 1, :] = True
    return scores, mask.expand(shape) if kind == "expanded" else mask, dprobs
