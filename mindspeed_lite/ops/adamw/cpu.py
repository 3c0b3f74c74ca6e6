"""adamw on CPU in one pass over memory, the low-precision copy included.

PyTorch's default makes about ten passes, its fused one one plus scaling and copy. Bits equal torch.optim.AdamW's on
scaled gradients; torch's fused one, the fallback without a compiler, differs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mindspeed_lite.ops import native
from mindspeed_lite.ops.adamw import moments, reference, torch_fused
from mindspeed_lite.ops.adamw.pieces import Blocks, Rule
from mindspeed_lite.ops.dispatch import report_fallback
from mindspeed_lite.ops.traced import address, is_traced

if TYPE_CHECKING:
    from mindspeed_lite.ops.adamw import Case

# `Form` in cpu.cpp
_ALONE, _COPIED, _HALVES = range(3)
# `Moments` in cpu.cpp
_MOMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}

_lib = native.Library(
    Path(__file__).with_name("cpu.cpp"),
    {"adamw": "pliiiiifffffffffi"},
    uses_torch=True,
    # Fused multiply-adds are explicit in the source.
    flags=("-ffp-contract=off",),
    returns_status=True,
)


def supported(case: Case) -> list[str]:
    reasons = []
    if case.dtype != torch.float32:
        reasons.append(f"parameters in {case.dtype}: the kernel takes float32")
    if case.grad_dtype not in (torch.float32, torch.bfloat16):
        reasons.append(f"gradients in {case.grad_dtype}: the kernel takes float32 and bfloat16")
    if not case.contiguous:
        reasons.append("a tensor is not contiguous")
    return reasons


def adamw(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    rule: Rule,
    outs: Sequence[torch.Tensor] | None = None,
    lows: Sequence[torch.Tensor] | None = None,
    blocks: Blocks | None = None,
) -> None:
    # torch.compile fuses the formula itself; fake tensors have no addresses.
    instead: Callable[..., None] | None = reference.adamw if is_traced(params[0]) or is_traced(grads[0]) else None
    if instead is None and (reason := _lib.unusable()) is not None:
        report_fallback("adamw", "cpu", (reason,), to="torch's fused AdamW")
        instead = torch_fused.adamw
    if instead is not None:
        instead(params, grads, exp_avgs, exp_avg_sqs, rule, outs, lows, blocks)
        return
    written, form = outs, _ALONE
    if lows is not None:
        # The kernel's first column holds the low halves.
        params, written, form = lows, params, _HALVES
    elif outs is not None and outs[0].dtype == torch.bfloat16:
        form = _COPIED
    table, work = array("q"), 0
    for place, param in enumerate(params):
        size = param.numel()
        work += size
        table.extend(
            (
                address(param),
                address(grads[place]),
                address(exp_avgs[place]),
                address(exp_avg_sqs[place]),
                address(written[place]) if form != _ALONE and written is not None else 0,
                *((0, 0) if blocks is None else map(address, blocks[place])),
                size,
            )
        )
    _lib.adamw(
        table.buffer_info()[0],
        len(params),
        grads[0].dtype == torch.bfloat16,
        form,
        _MOMENTS[exp_avgs[0].dtype],
        moments.seed(rule.step),
        not rule.decoupled,
        1.0 if rule.grad_scale is None else float(rule.grad_scale),
        *rule.numbers(),
        native.threads(work),
    )
    if outs is not None and form == _ALONE:
        torch._foreach_copy_(list(outs), [p.view_as(o) for p, o in zip(params, outs, strict=True)])
