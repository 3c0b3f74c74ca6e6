"""Cases of grouped_matmul, compared with a loop over linear layers.

The last expert has no rows.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_lite.ops.case import Draw, OperatorCases, OwnLayout, Peer, Work
from mindspeed_lite.ops.grouped_matmul import grouped_matmul


@dataclass(frozen=True)
class Shape:
    """x [rows, inputs], expert weights [outputs, inputs]."""

    rows: int
    inputs: int
    outputs: int
    experts: int

    def make(self, draw: Draw) -> tuple[Tensor, ...]:
        scale = max(self.inputs, 1) ** -0.5
        weights = [draw(self.outputs, self.inputs, scale=scale) for _ in range(self.experts)]
        return draw(self.rows, self.inputs), *weights

    def ours(self, x: Tensor, *weights: Tensor) -> Tensor:
        return grouped_matmul(x, weights, list(counts(self)))

    def reference(self, x: Tensor, *weights: Tensor) -> Tensor:
        parts = zip(torch.split(x, list(counts(self))), weights, strict=True)
        return torch.cat([torch.nn.functional.linear(rows, weight) for rows, weight in parts])

    def work(self, size: int) -> tuple[Work, Work]:
        rows, k, n, experts = self.rows, self.inputs, self.outputs, self.experts
        matmul = 2 * rows * n * k
        forward = Work((rows * (n + k) + experts * n * k) * size, matmul)
        return forward, Work((rows * (n + 2 * k) + 2 * experts * n * k) * size, 2 * matmul)


@functools.lru_cache(8)
def counts(shape: Shape) -> tuple[int, ...]:
    """Rows per expert as a list, since fake tensors have no values."""
    if shape.experts == 1:
        return (shape.rows,)
    draws = random.Random(2)
    odds = [math.exp(draws.gauss(0, 1)) for _ in range(shape.experts - 1)]
    chosen = Counter(draws.choices(range(shape.experts - 1), odds, k=shape.rows))
    return (*(chosen[expert] for expert in range(shape.experts - 1)), 0)


def grouped_mm(shape: Shape) -> Callable[..., Tensor]:
    product: Callable[..., Tensor] = torch.nn.functional.grouped_mm  # type: ignore[attr-defined, unused-ignore]
    ends = list(itertools.accumulate(counts(shape)))
    return OwnLayout(
        lambda x, *weights: (x.clone(), torch.stack(weights), torch.tensor(ends, dtype=torch.int32, device=x.device)),
        lambda x, weights, offs: product(x, weights.transpose(1, 2), offs=offs),
        "the weights are one tensor, stacked beforehand",
    )


# Qwen3-30B-A3B and Mixtral 8x7B.
CASES = OperatorCases(
    "grouped_matmul",
    Shape,
    correctness=("300x64x96x4", "37x100x65x3", "513x136x72x9"),
    cpu=("12288x512x256x64", "2048x1024x1408x8"),
    accelerator=("65536x2048x1536x128", "16384x4096x28672x8"),
    peers={"torch grouped_mm": Peer(grouped_mm)},
)
