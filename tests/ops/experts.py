"""A layer of experts to compute, the loop that is replaced, and what both are measured by."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mindspeed_lite.ops.dispatch import force
from mindspeed_lite.ops.grouped_matmul import grouped_matmul

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# fp32 sums in another order: roundings of which most cancel.
SLACK = 4 * torch.finfo(torch.float32).eps
COUNTS = ([3, 0, 5, 1], [0, 0, 0, 7], [4, 4], [6], [0, 9, 0])


class Problem:
    """Inputs of a layer of experts."""

    def __init__(
        self, counts: Sequence[int], n: int, k: int, dtype: torch.dtype, biased: bool = False, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        rows, experts = sum(counts), len(counts)
        self.counts = list(counts)
        self.x, self.dy = normal(rows, k), normal(rows, n)
        self.weights = [normal(n, k) for _ in range(experts)]
        self.biases = [normal(n) for _ in range(experts)] if biased else None

    def run(self, function: Callable[..., torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """[y, dx, dw of every expert, db of every expert] of function(x, weights, counts, biases)."""
        x = self.x.to(dtype or self.x.dtype, copy=True).requires_grad_()
        weights = [each.to(dtype or each.dtype, copy=True).requires_grad_() for each in self.weights]
        biases = self.biases and [each.to(dtype or each.dtype, copy=True).requires_grad_() for each in self.biases]
        y = function(x, weights, self.counts, biases)
        leaves = [x, *weights, *(biases or ())]
        gradients = torch.autograd.grad(y, leaves, self.dy.to(y.dtype))
        return [y.detach(), gradients[0], torch.stack(gradients[1 : 1 + len(weights)]),
                *([torch.stack(gradients[1 + len(weights) :])] if biases else [])]  # fmt: skip

    def exact(self) -> list[torch.Tensor]:
        return self.run(loop, torch.float64)


NAMES = ("y", "dx", "dw", "db")


def loop(
    x: torch.Tensor, weights: Sequence[torch.Tensor], counts: Sequence[int], biases: Sequence[torch.Tensor] | None
) -> torch.Tensor:
    """What is replaced: a linear layer for each expert, joined."""
    return torch.cat(
        [
            torch.nn.functional.linear(rows, weight, None if biases is None else biases[expert])
            for expert, (rows, weight) in enumerate(zip(x.split(list(counts)), weights, strict=True))
        ]
    )


def on(backend: str) -> Callable[..., torch.Tensor]:
    def function(*args: object) -> torch.Tensor:
        with force("grouped_matmul", backend):
            return grouped_matmul(*args)  # type: ignore[arg-type]

    return function
