"""What all parameters of one call of adamw have in common."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Rule(NamedTuple):
    """The options of `adamw`, as every implementation takes them."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: float
    grad_scale: float | torch.Tensor | None = None
    decoupled: bool = True

    def numbers(self) -> tuple[float, ...]:
        """keep, l2, 1 - b1, b2, 1 - b2, lr / (1 - b1^t), sqrt(1 - b2^t), eps: what a kernel computes with."""
        beta1, beta2 = self.betas
        return (
            1 - self.lr * self.weight_decay if self.decoupled else 1.0,
            0.0 if self.decoupled else self.weight_decay,
            1 - beta1,
            beta2,
            1 - beta2,
            self.lr / (1 - beta1**self.step),
            (1 - beta2**self.step) ** 0.5,
            self.eps,
        )
