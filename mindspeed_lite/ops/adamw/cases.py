"""Cases of adamw, compared with a Megatron step: clipping, torch's AdamW, and the 16-bit copy.

Parameters, gradients and moments are fp32; the dtype is the copy's. Work counts one read and write per tensor, and 14
operations per element.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from mindspeed_lite.ops.adamw import adamw
from mindspeed_lite.ops.case import Draw, OperatorCases, Peer, Work

RULE: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEP = 10
# Near 1, so that gradients scaled in place keep their size over thousands of calls.
SCALE = 1 - 2.0**-20


@dataclass(frozen=True)
class Shape:
    """`tensors` parameters of `elements`."""

    tensors: int
    elements: int

    def make(self, draw: Draw) -> list[Tensor]:
        """Parameters, gradients, first and second moments, copies."""

        def drawn(scale: float) -> list[Tensor]:
            return [draw(self.elements, scale=scale, wide=True, gradient=False) for _ in range(self.tensors)]

        params, grads, exp_avgs, exp_avg_sqs = (drawn(scale) for scale in (0.02, 1e-2, 1e-2, 1e-2))
        for exp_avg_sq in exp_avg_sqs:
            exp_avg_sq.square_().add_(1e-6)
        return [*params, *grads, *exp_avgs, *exp_avg_sqs, *(param.to(draw.dtype, copy=True) for param in params)]

    def ours(self, *tensors: Tensor) -> Tensor:
        *state, outs = _lists(self, tensors)
        adamw(*state, **RULE, step=STEP, grad_scale=SCALE, outs=outs)
        return outs[0]

    def reference(self, *tensors: Tensor, fused: bool = False) -> Tensor:
        params, grads, exp_avgs, exp_avg_sqs, outs = _lists(self, tensors)
        torch._foreach_mul_(grads, SCALE)
        steps = [torch.tensor(STEP - 1.0, device=param.device if fused else "cpu") for param in params]
        rule = {name: value for name, value in RULE.items() if name != "betas"}
        beta1, beta2 = RULE["betas"]
        torch_adamw(
            params, grads, exp_avgs, exp_avg_sqs, [], steps, beta1=beta1, beta2=beta2, amsgrad=False, maximize=False,
            fused=fused, **rule,
        )  # fmt: skip
        torch._foreach_copy_(outs, params)
        return outs[0]

    def work(self, size: int) -> tuple[Work, None]:
        count = self.tensors * self.elements
        return Work((7 * max(4, size) + size) * count, 14 * count), None


def _lists(shape: Shape, tensors: tuple[Tensor, ...]) -> list[list[Tensor]]:
    count = shape.tensors
    return [list(tensors[start : start + count]) for start in range(0, 5 * count, count)]


# Many small matrices, a few, and large-model layers.
_TIMED = ("256x4096", "8x1048576", "4x16777216")

CASES = OperatorCases(
    "adamw",
    Shape,
    correctness=("3x1000", "2x65537"),
    cpu=_TIMED,
    accelerator=(*_TIMED, "16x67108864"),
    peers={"torch fused": Peer(lambda shape: functools.partial(shape.reference, fused=True))},
)
