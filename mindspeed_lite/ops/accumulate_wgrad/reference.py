"""Reference of accumulate_wgrad: bitwise equal to autograd plus a gradient hook."""

from __future__ import annotations

from torch import Tensor

from mindspeed_lite.ops import traced


@traced.observed
def accumulate_wgrad(main_grad: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    return main_grad.add_(dy.t() @ x)  # [N, M] [M, K]
