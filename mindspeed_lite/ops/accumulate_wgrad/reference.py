"""Reference of accumulate_wgrad: bitwise equal to autograd plus a gradient hook."""

from __future__ import annotations

import torch


def accumulate_wgrad(main_grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return main_grad.add_(dy.t() @ x)  # [N, M] [M, K]
