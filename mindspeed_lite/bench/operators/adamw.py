"""adamw: against what Megatron's step is without it: clipping, torch's AdamW, and the copy into 16 bits.

Counted as bytes: parameter and both moments, in fp32, are read and written, the gradient, in fp32, is read, the copy is
written. Counted as operations on each element: 1 to scale, 1 to decay, 3 and 4 for the moments, 5 for the parameter.
The dtype is that of the copy.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.optim.adamw import adamw as torchs_adamw

from mindspeed_lite.bench.operators import OURS, TORCH, Case, Contender, Work, compiled, dtype_name
from mindspeed_lite.ops.adamw import Rule, adamw, torch_fused

RULE: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEP = 10
# So near to 1 that gradients which are scaled in place stay what they are over thousands of calls.
SCALE = 1 - 2.0**-20


def shapes(device: str, quick: bool) -> list[str]:
    """A few matrices, many small ones, and a layer or two of a large model."""
    if quick:
        return ["8x65536"]
    return ["256x4096", "8x1048576", "4x16777216"] + ([] if device == "cpu" else ["16x67108864"])


def case(text: str, device: str, dtype: torch.dtype) -> Case:
    """The case of `TENSORSxELEMENTS`."""
    match = re.fullmatch(r"([1-9]\d*)[xX]([1-9]\d*)", text)
    if match is None:
        raise ValueError("want TENSORSxELEMENTS with both at least 1, for example 8x1048576")
    count, size = int(match[1]), int(match[2])
    state = torch.float64 if dtype == torch.float64 else torch.float32

    def make() -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        params, grads, exp_avgs, exp_avg_sqs = (
            [torch.randn(size, generator=generator).to(device, state).mul_(scale) for _ in range(count)]
            for scale in (0.02, 1e-2, 1e-2, 1e-2)
        )
        for exp_avg_sq in exp_avg_sqs:
            exp_avg_sq.square_().add_(1e-6)
        outs = [param.to(dtype, copy=True) for param in params]
        return *params, *grads, *exp_avgs, *exp_avg_sqs, *outs

    def lists(tensors: tuple[torch.Tensor, ...]) -> list[list[torch.Tensor]]:
        return [list(tensors[start : start + count]) for start in range(0, 5 * count, count)]

    def ours(*tensors: torch.Tensor) -> torch.Tensor:
        *state, outs = lists(tensors)
        adamw(*state, **RULE, step=STEP, grad_scale=SCALE, outs=outs)
        return outs[0]

    def plain(*tensors: torch.Tensor) -> torch.Tensor:
        params, grads, exp_avgs, exp_avg_sqs, outs = lists(tensors)
        for grad in grads:
            grad.mul_(SCALE)
        torchs_adamw(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            [torch.tensor(STEP - 1.0) for _ in params],
            amsgrad=False,
            beta1=RULE["betas"][0],
            beta2=RULE["betas"][1],
            lr=RULE["lr"],
            weight_decay=RULE["weight_decay"],
            eps=RULE["eps"],
            maximize=False,
        )
        for param, out in zip(params, outs, strict=True):
            out.copy_(param)
        return outs[0]

    def fused(*tensors: torch.Tensor) -> torch.Tensor:
        *state, outs = lists(tensors)
        torch._foreach_mul_(state[1], SCALE)
        params, grads, exp_avgs, exp_avg_sqs = state
        torch_fused.adamw(params, grads, exp_avgs, exp_avg_sqs, Rule(**RULE, step=STEP), outs)
        return outs[0]

    bytes_of_one = 7 * state.itemsize + dtype.itemsize
    return Case(
        operator="adamw",
        name=f"{count}x{size} {dtype_name(dtype)}",
        device=device,
        dtype=dtype,
        make=make,
        forward=Work(bytes_of_one * count * size, 14 * count * size),
        both=None,
        contenders=(
            Contender(OURS, lambda: ours),
            Contender(TORCH, lambda: plain),
            Contender("torch fused", lambda: fused),
            compiled(lambda: plain),
        ),
    )
