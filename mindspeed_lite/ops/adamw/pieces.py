"""Runs fp32-only steps on split parameters and narrow moments, in chunks of fp32 values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_lite.ops.adamw import halves, moments

# (exponents of exp_avg, of exp_avg_sq) per parameter.
Blocks = Sequence[tuple[Tensor, Tensor]]

# Elements per chunk; a multiple of the moments' block.
CHUNK = 1 << 22


class Lists(NamedTuple):
    """The tensors of `adamw`."""

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]
    outs: Sequence[Tensor] | None = None
    lows: Sequence[Tensor] | None = None
    blocks: Blocks | None = None


class Rule(NamedTuple):
    """The options of `adamw`."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: float
    grad_scale: float | Tensor | None = None
    decoupled: bool = True

    def numbers(self) -> tuple[float, ...]:
        """Kernel constants keep, l2, 1 - b1, b2, 1 - b2, lr / (1 - b1^t), sqrt(1 - b2^t), eps."""
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


def piecewise(step: Callable[[Lists, Rule], None]) -> Callable[[Lists, Rule], None]:
    """Extends `step` in fp32 to the other storage forms."""

    @functools.wraps(step)
    def adamw(lists: Lists, rule: Rule) -> None:
        params, grads, exp_avgs, exp_avg_sqs, outs, lows, blocks = lists
        narrow = exp_avgs[0].dtype in (torch.bfloat16, torch.uint8)
        if lows is None and not narrow:
            step(lists, rule)
            return
        for place, tensors in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
            flat = [each.view(-1) for each in tensors]
            for start in range(0, flat[0].numel(), CHUNK):
                some = slice(start, start + CHUNK)
                param, grad, exp_avg, exp_avg_sq = (each[some] for each in flat)
                exponents = None
                if blocks is not None:
                    part = slice(start // moments.BLOCK, -(-(start + CHUNK) // moments.BLOCK))
                    exponents = (blocks[place][0][part], blocks[place][1][part])
                first, second = moments.unpack(exp_avg, exp_avg_sq, exponents) if narrow else (exp_avg, exp_avg_sq)
                out = None if outs is None else [outs[place].view(-1)[some]]
                if lows is None:
                    step(Lists([param], [grad], [first], [second], out), rule)
                else:
                    low = lows[place].view(-1)[some]
                    word = halves.join(param, low, second)
                    second.abs_()
                    step(Lists([word], [grad], [first], [second]), rule)
                    halves.split(word, param, low, second)
                if narrow:
                    moments.pack((first, second), exp_avg, exp_avg_sq, exponents, moments.seed(rule.step))

    return adamw
