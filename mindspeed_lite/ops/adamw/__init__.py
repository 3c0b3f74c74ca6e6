"""One step of AdamW over a list of tensors, in place, for the optimizer of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_lite.ops.adamw import moments, reference
from mindspeed_lite.ops.adamw.pieces import Blocks, Lists, Rule
from mindspeed_lite.ops.dispatch import Operator

__all__ = ["OPERATOR", "Case", "Lists", "Rule", "adamw"]

Tensors = Sequence[Tensor]


class Case(NamedTuple):
    """Call properties that select a backend."""

    device: str
    dtype: torch.dtype
    grad_dtype: torch.dtype
    out_dtype: torch.dtype | None
    decoupled: bool
    contiguous: bool
    halves: bool = False
    moments: torch.dtype = torch.float32


OPERATOR = Operator(
    "adamw",
    reference.adamw,  # type: ignore[arg-type]  # in place, returns nothing
    batch_dependence={},
)


@torch.no_grad()
def adamw(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: float,
    grad_scale: float | Tensor | None = None,
    decoupled: bool = True,
    outs: Tensors | None = None,
    lows: Tensors | None = None,
    blocks: Blocks | None = None,
) -> None:
    """For every p, g, m, v of the lists, with t = `step` counted from 1 and (b1, b2) = `betas`:

        g'  = g * grad_scale                      g is not written
        p   = p * (1 - lr * weight_decay)         or, not `decoupled` (L2): g' = g' + weight_decay * p
        m   = m + (1 - b1) * (g' - m)
        v   = b2 * v + (1 - b2) * g'^2
        p   = p - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
        out = p                                   rounded to out's dtype

    Computed in fp32, without gradient.

    params, exp_avgs, exp_avg_sqs: fp32 (or all float64); grads: fp32, bf16 or fp16; outs: any one dtype.
    grad_scale: number or one-element tensor on the device (inverse loss scale times clip coefficient).
    lows: int16 low halves of fp32 params whose high halves are bf16 `params` (see `halves`), without outs. Same bits as
        fp32 params.
    blocks: block exponents of uint8 moments (see `moments.exponents`). bf16 and uint8 moments are stochastically
        rounded, as a function of their values and `step` (see `moments`).
    """
    lists = Lists(params, grads, exp_avgs, exp_avg_sqs, outs, lows, blocks)
    case = _case(lists, decoupled or weight_decay == 0.0)
    if case is None:
        return
    rule = Rule(lr, betas, eps, weight_decay, step, grad_scale, case.decoupled)
    OPERATOR.choose(case, params[0], grads[0])(lists, rule)


def _case(given: Lists, decoupled: bool) -> Case | None:
    params, _, _, _, outs, lows, blocks = given
    lists = [*given[:4], *(each for each in (outs, lows) if each is not None)]
    count = len(params)
    if any(len(each) != count for each in lists):
        raise ValueError(f"adamw: lists of different lengths: {', '.join(str(len(each)) for each in lists)}")
    if not count:
        return None
    first, contiguous = params[0], True
    index = first.get_device()  # cheaper to compare than `device`
    sizes = [param.numel() for param in params]
    dtypes = [each[0].dtype for each in lists]
    for each, dtype in zip(lists, dtypes, strict=True):
        for tensor, size in zip(each, sizes, strict=True):
            if tensor.dtype is not dtype or tensor.get_device() != index:
                raise ValueError(
                    f"adamw: a list holds {tensor.dtype} on {tensor.device} beside {dtype} on {first.device}"
                )
            if tensor.numel() != size:
                shapes = [", ".join(str(tuple(t.shape)) for t in place) for place in zip(*lists, strict=True)]
                raise ValueError(f"adamw: shapes do not fit: {'; '.join(shapes)}")
            contiguous = contiguous and tensor.is_contiguous()
    kind, dtype, grad_dtype = first.device.type, dtypes[0], dtypes[1]
    if lows is not None:
        if (dtype, dtypes[-1]) != (torch.bfloat16, torch.int16) or outs is not None:
            raise ValueError(
                f"adamw: want halves in bfloat16 and int16 and no outs, not {dtype}, {dtypes[-1]}"
                f"{'' if outs is None else ' with outs'}"
            )
        dtype = torch.float32
    moment = dtypes[2]
    if dtype not in (torch.float32, torch.float64) or moment != dtypes[3] or moment not in (dtype, *_NARROW):
        raise ValueError(
            f"adamw: want parameters and both moments in float32, or moments in bfloat16 or uint8, not {dtypes[0]}, "
            f"{dtypes[2]}, {dtypes[3]}"
        )
    if (moment == torch.uint8) != (blocks is not None):
        raise ValueError(f"adamw: moments in {moment} {'without' if blocks is None else 'with'} exponents of blocks")
    for size, pair in zip(sizes, blocks or (), strict=blocks is not None):
        if any(each.numel() != -(-size // moments.BLOCK) or each.dtype != torch.uint8 for each in pair):
            raise ValueError(f"adamw: want {-(-size // moments.BLOCK)} exponents in uint8 for {size} numbers")
    if not contiguous and (lows is not None or moment != dtype):
        raise ValueError("adamw: parameters in halves and narrow moments must be contiguous")
    out_dtype = None if outs is None else dtypes[4]
    return Case(kind, dtype, grad_dtype, out_dtype, decoupled, contiguous, lows is not None, moment)


_NARROW = (torch.bfloat16, torch.uint8)
