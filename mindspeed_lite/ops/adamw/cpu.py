"""adamw on CPU in one pass over memory, the low-precision copy included.

PyTorch's default makes about ten passes, its fused one one plus scaling and copy. Bits equal torch.optim.AdamW's on
scaled gradients.
"""

from __future__ import annotations

from array import array

import torch

from mindspeed_lite.ops import native
from mindspeed_lite.ops.adamw import Case
from mindspeed_lite.ops.adamw.pieces import Lists, Rule, piecewise
from mindspeed_lite.ops.traced import address

# `Form` in cpu.cpp
_ALONE, _COPIED, _HALVES = "alone", "copied", "halves"

# Fused multiply-adds are explicit in the source.
LIBRARY = native.Library(__file__, uses_torch=True, flags=("-ffp-contract=off",))
DTYPES = (torch.float32,)


def supported(case: Case) -> list[str]:
    reasons = []
    if case.grad_dtype not in native.DTYPES:
        reasons.append(f"gradients in {case.grad_dtype}: the kernel takes float32 and bfloat16")
    if not case.contiguous:
        reasons.append("a tensor is not contiguous")
    return reasons


def adamw(lists: Lists, rule: Rule) -> None:
    (_step if lists.exp_avgs[0].dtype == torch.float32 else _narrow_step)(lists, rule)


def _step(lists: Lists, rule: Rule) -> None:
    params, grads, exp_avgs, exp_avg_sqs, outs, lows, _ = lists
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
                size,
            )
        )
    LIBRARY.kernel(form, grads[0].dtype)(
        table.buffer_info()[0],
        len(params),
        not rule.decoupled,
        1.0 if rule.grad_scale is None else float(rule.grad_scale),
        *rule.numbers(),
        native.threads(work),
    )
    if outs is not None and form == _ALONE:
        torch._foreach_copy_(list(outs), [p.view_as(o) for p, o in zip(params, outs, strict=True)])


# Moments are converted by PyTorch.
_narrow_step = piecewise(_step)
