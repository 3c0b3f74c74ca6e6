"""Cases of linear_cross_entropy, compared with a linear layer and fp32 cross_entropy."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_lite.ops.case import Draw, OperatorCases, Peer, Work
from mindspeed_lite.ops.linear_cross_entropy import linear_cross_entropy


@dataclass(frozen=True)
class Shape:
    """x [rows, hidden], weight [vocabulary, hidden]."""

    rows: int
    hidden: int
    vocabulary: int


def inputs(shape: Shape, draw: Draw) -> tuple[Tensor, ...]:
    weight = draw(shape.vocabulary, shape.hidden, scale=max(shape.hidden, 1) ** -0.5)
    return draw(shape.rows, shape.hidden), weight, draw.integers(shape.vocabulary, shape.rows)


def ours(shape: Shape, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return linear_cross_entropy(x, weight, labels)


def reference(shape: Shape, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = torch.nn.functional.linear(x, weight)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.nn.functional.cross_entropy(wide, labels, reduction="none")


def work(shape: Shape, size: int) -> tuple[Work, Work]:
    once = (shape.rows + shape.vocabulary) * shape.hidden * size
    matmul = 2 * shape.rows * shape.hidden * shape.vocabulary
    return Work(once, matmul), Work(2 * once, 2 * matmul)


def liger(shape: Shape) -> Callable[..., Tensor]:
    """Liger-Kernel with per-row loss and fp32 weight gradient sums."""
    module: Any = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    function: Any = module.LigerFusedLinearCrossEntropyFunction
    options = (None, None, -100, 0.0, 0.0, "none", None, False, torch.float32)
    return lambda x, weight, labels: function.apply(x, weight, labels, *options)[0]


# Llama 3 8B, unsharded and over eight ranks.
CASES = OperatorCases(
    operator="linear_cross_entropy",
    shape=Shape,
    inputs=inputs,
    ours=ours,
    reference=reference,
    work=work,
    correctness=("24x16x48", "128x256x4096"),
    cpu=("1024x1024x32768",),
    accelerator=("8192x4096x32768", "8192x4096x128256", "8192x8192x16032"),
    quick="128x256x4096",
    peers={"liger": Peer(liger, "liger_kernel")},
)
