"""Implementations that rope is compared with; cases.py declares the cases."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from mindspeed_lite.ops.case import Case, OwnLayout, generator
from mindspeed_lite.ops.rope import rope
from mindspeed_lite.ops.rope.angles import cos_sin
from mindspeed_lite.ops.rope.cases import Shape


def inputs(case: Case) -> tuple[torch.Tensor, ...]:
    """x [s, b, n, d], every third of what a fused projection gives."""
    s, b, n, d = case.shape[:4]
    draws = generator(case)
    mixed = torch.randn(s, b, n, 3, d, generator=draws, device=draws.device).to(case.device, case.torch_dtype)
    return (mixed[..., 1, :].requires_grad_(),)


def ours(case: Case) -> Callable[..., torch.Tensor]:
    """The operator."""
    shape = case.shape
    return lambda x: rope(x, *cos_sin(_angles(shape, x.device.type)), pairs=shape.pairs)


def plain(case: Case) -> Callable[..., torch.Tensor]:
    """What Megatron's local implementation computes, as whole-tensor operations in x's dtype."""
    angles, pairs, width = _angles(case.shape, case.device), case.shape.pairs, case.shape.r

    def run(x: torch.Tensor) -> torch.Tensor:
        turned, rest = x[..., :width], x[..., width:]
        if pairs == "regrouped":
            turned = torch.cat((turned[..., 0::2], turned[..., 1::2]), -1)
        if pairs == "interleaved":
            other = torch.stack((-turned[..., 1::2], turned[..., 0::2]), -1).flatten(-2)
        else:
            other = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), -1)
        y = turned * angles.cos().to(x.dtype) + other * angles.sin().to(x.dtype)
        return torch.cat((y, rest), -1)

    return run


def liger(case: Case) -> Callable[..., torch.Tensor]:
    """Liger-Kernel's, half of the heads as queries and the others as keys."""
    function: Any = importlib.import_module("liger_kernel.ops.rope").LigerRopeFunction
    angles, first = _angles(case.shape, case.device)[:, 0, 0], case.shape.n // 2
    cos, sin = angles.cos(), angles.sin()

    def arrange(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # [b, s, heads, d] in memory, [b, heads, s, d] by name.
        parts = (x[:, :, :first], x[:, :, first:])
        return tuple(
            part.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(1, 2) for part in parts
        )

    def restore(turned: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.cat(turned, 1).permute(2, 0, 1, 3)

    return OwnLayout(
        arrange,
        lambda q, k: function.apply(q, k, cos, sin),
        "x lies as two tensors [batch, sequence, heads, size], and y is written over them",
        restore,
    )


def engine(case: Case) -> Callable[..., torch.Tensor]:
    """Transformer Engine's."""
    function: Any = importlib.import_module("transformer_engine.pytorch.attention.rope").apply_rotary_pos_emb
    how = {"tensor_format": "sbhd", "fused": True, "interleaved": case.shape.pairs == "interleaved"}
    return lambda x: function(x, _angles(case.shape, x.device.type), **how)


@functools.lru_cache(4)
def _angles(shape: Shape, device: str) -> torch.Tensor:
    """[s, 1, 1, r], those of a pair equal; made once, as in a model."""
    angles = torch.arange(shape.s).float()[:, None] * 1e4 ** -(torch.arange(0, shape.r, 2).float() / shape.r)
    interleaved = shape.pairs == "interleaved"
    both = torch.stack((angles, angles), -1).flatten(-2) if interleaved else torch.cat((angles, angles), -1)
    return both[:, None, None].to(device)
