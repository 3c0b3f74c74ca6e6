"""adamw on CPU as one pass over memory, the low-precision copy included.

PyTorch's AdamW makes about ten passes on CPU unless asked for its fused one, which makes one; scaling gradients and
copying into 16 bits come on top. Without a compiler the fused one serves.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mindspeed_lite.ops import native
from mindspeed_lite.ops.adamw import reference, torch_fused
from mindspeed_lite.ops.dispatch import report_fallback

if TYPE_CHECKING:
    from mindspeed_lite.ops.adamw import Case

_lib = native.Library(Path(__file__).with_name("cpu.cpp"), {"adamw": "pliiifffffffffi"})


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
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: float,
    grad_scale: float | torch.Tensor | None = None,
    decoupled: bool = True,
    outs: Sequence[torch.Tensor] | None = None,
) -> None:
    # A compiler fuses the plain formula itself, and has no addresses to hand over.
    instead: Callable[..., None] | None = reference.adamw if torch.compiler.is_compiling() else None
    if instead is None and (reason := _lib.unusable()) is not None:
        report_fallback("adamw", "cpu", (reason,), to="torch's fused AdamW")
        instead = torch_fused.adamw
    if instead is not None:
        instead(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            step=step,
            grad_scale=grad_scale,
            decoupled=decoupled,
            outs=outs,
        )
        return
    copies = outs is not None and outs[0].dtype == torch.bfloat16
    table, work = array("q"), 0
    for place, param in enumerate(params):
        size = param.numel()
        work += size
        table.extend(
            (
                param.data_ptr(),
                grads[place].data_ptr(),
                exp_avgs[place].data_ptr(),
                exp_avg_sqs[place].data_ptr(),
                outs[place].data_ptr() if copies and outs is not None else 0,
                size,
            )
        )
    beta1, beta2 = betas
    _lib.adamw(
        table.buffer_info()[0],
        len(params),
        grads[0].dtype == torch.bfloat16,
        copies,
        not decoupled,
        1.0 if grad_scale is None else float(grad_scale),
        1 - lr * weight_decay,
        weight_decay,
        1 - beta1,
        beta2,
        1 - beta2,
        lr / (1 - beta1**step),
        (1 - beta2**step) ** 0.5,
        eps,
        native.threads(work),
    )
    if outs is not None and not copies:
        torch._foreach_copy_(list(outs), [p.view_as(o) for p, o in zip(params, outs, strict=True)])
