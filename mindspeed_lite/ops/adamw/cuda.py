"""adamw on CUDA as one Triton launch over all tensors, the low-precision copy included.

The kernel finds its tensors through a table of addresses and its work through a list of pieces, both on the device.
They are kept, and made anew when an address or a size changes, which in a training run with gradient buffers is
never. PyTorch's fused AdamW makes one pass as well, but leaves the copy to another. Without Triton it serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_lite.ops.adamw import torch_fused
from mindspeed_lite.ops.dispatch import report_fallback

try:
    from mindspeed_lite.ops.adamw import kernel
except ImportError as error:  # said by the first call
    _missing = f"Triton does not import: {error}"
else:
    _missing = ""

if TYPE_CHECKING:
    from mindspeed_lite.ops.adamw import Case

# Triton's names.
_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_BLOCK = 2048
_WARPS = 8
_ALIGNMENT = 16
# Tables of so many lists: parameter groups, dense and expert, of a few optimizers.
_KEPT = 32
_tables: dict[Any, Any] = {}


def supported(case: Case) -> list[str]:
    reasons = []
    if case.dtype != torch.float32:
        reasons.append(f"parameters in {case.dtype}: the kernel takes float32")
    if case.grad_dtype not in _TYPES:
        reasons.append(f"gradients in {case.grad_dtype}")
    if case.out_dtype is not None and case.out_dtype not in _TYPES:
        reasons.append(f"copies in {case.out_dtype}")
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
    if _missing:
        report_fallback("adamw", "cuda", (_missing,), to="torch's fused AdamW")
        torch_fused.adamw(
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
    device = params[0].device
    lists = (params, grads, exp_avgs, exp_avg_sqs, params if outs is None else outs)
    addresses, aligned = _addresses(lists, device)
    pieces, count = _pieces(tuple(param.numel() for param in params), device)
    if not count:
        return
    beta1, beta2 = betas
    scale_tensor = grad_scale if isinstance(grad_scale, torch.Tensor) else None
    with torch.cuda.device(device) if device.type == "cuda" else torch.no_grad():
        kernel.step[(count,)](
            addresses,
            pieces,
            scale_tensor,
            1.0 if grad_scale is None or scale_tensor is not None else grad_scale,
            1 - lr * weight_decay if decoupled else 1.0,
            0.0 if decoupled else weight_decay,
            1 - beta1,
            beta2,
            1 - beta2,
            lr / (1 - beta1**step),
            (1 - beta2**step) ** 0.5,
            eps,
            GRAD=_TYPES[grads[0].dtype],
            OUT=None if outs is None else _TYPES[outs[0].dtype],
            L2=not decoupled,
            ALIGNED=aligned,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )


def _addresses(lists: Sequence[Sequence[torch.Tensor]], device: torch.device) -> tuple[torch.Tensor, bool]:
    """Rows of param, grad, exp_avg, exp_avg_sq, out, size on the device, and whether all addresses are aligned."""
    rows = tuple((*(t.data_ptr() for t in tensors), tensors[0].numel()) for tensors in zip(*lists, strict=True))
    key = (device, rows)
    found = _tables.get(key)
    if found is None:
        aligned = all(address % _ALIGNMENT == 0 for row in rows for address in row[:-1])
        found = _keep(key, (torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True), aligned))
    return found  # type: ignore[no-any-return]


def _pieces(sizes: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, int]:
    """Rows of (place in the list, number of the block within that tensor), and how many there are."""
    key = (device, sizes)
    found = _tables.get(key)
    if found is None:
        blocks = torch.tensor([-(-size // _BLOCK) for size in sizes])
        place = torch.repeat_interleave(torch.arange(len(sizes)), blocks)
        number = torch.arange(int(blocks.sum())) - (blocks.cumsum(0) - blocks)[place]
        rows = torch.stack((place, number), dim=1).to(torch.int32).contiguous()
        found = _keep(key, (rows.to(device, non_blocking=True), len(rows)))
    return found  # type: ignore[no-any-return]


def _keep(key: Any, value: Any) -> Any:
    while len(_tables) >= _KEPT:
        _tables.pop(next(iter(_tables)))
    _tables[key] = value
    return value
