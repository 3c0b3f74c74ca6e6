"""accumulate_wgrad in plain PyTorch: bitwise what autograd and a gradient hook compute."""

from __future__ import annotations

import torch


def accumulate_wgrad(main_grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """main_grad += dy^T x, with the product in the dtype of dy and x."""
    return main_grad.add_(dy.t() @ x)  # [N, M] [M, K]
