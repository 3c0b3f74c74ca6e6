"""adamw on CUDA as one Triton launch over all tensors, the low-precision copy included.

The tables of addresses and blocks stay on the device until an address or size changes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed_lite.ops.adamw import Case, kernel, moments
from mindspeed_lite.ops.adamw.pieces import Blocks, Lists, Rule
from mindspeed_lite.ops.row_kernels import on
from mindspeed_lite.ops.streams import stream_id
from mindspeed_lite.ops.traced import address

_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_MOMENTS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.uint8: "uint8"}
_BLOCK = 2048
_WARPS = 8
_ALIGNMENT = 16
# Cached tables: parameter groups, dense and expert, of a few optimizers.
_KEPT = 32


DTYPES = (torch.float32,)


def supported(case: Case) -> list[str]:
    reasons = []
    if case.grad_dtype not in _TYPES:
        reasons.append(f"gradients in {case.grad_dtype}")
    if case.out_dtype is not None and case.out_dtype not in _TYPES:
        reasons.append(f"copies in {case.out_dtype}")
    if not case.contiguous:
        reasons.append("a tensor is not contiguous")
    return reasons


def adamw(lists: Lists, rule: Rule) -> None:
    params, grads, exp_avgs, exp_avg_sqs, outs, lows, blocks = lists
    device = params[0].device
    first, last = (params, params if outs is None else outs) if lows is None else (lows, params)
    addresses, aligned = _addresses((first, grads, exp_avgs, exp_avg_sqs, last), blocks, device)
    pieces, count = _pieces(tuple(param.numel() for param in params), device, stream_id(device))
    if not count:
        return
    scale = rule.grad_scale
    scale_tensor = scale if isinstance(scale, Tensor) else None
    with on(params[0]):
        kernel.step[(count,)](
            addresses,
            pieces,
            scale_tensor,
            1.0 if scale is None or scale_tensor is not None else scale,
            *rule.numbers(),
            moments.seed(rule.step),
            GRAD=_TYPES[grads[0].dtype],
            OUT=None if outs is None else _TYPES[outs[0].dtype],
            HALVES=lows is not None,
            MOMENTS=_MOMENTS[exp_avgs[0].dtype],
            L2=not rule.decoupled,
            ALIGNED=aligned,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )


def _addresses(lists: Sequence[Sequence[Tensor]], blocks: Blocks | None, device: torch.device) -> tuple[Tensor, bool]:
    """Device table (param, grad, exp_avg, exp_avg_sq, out, two exponents, size); whether it is aligned.

    Exponents do not count for alignment. Split parameters have the low half first and the high half fifth.
    """
    rows = []
    for place, tensors in enumerate(zip(*lists, strict=True)):
        exponents = (0, 0) if blocks is None else map(address, blocks[place])
        rows.append((*map(address, tensors), *exponents, tensors[0].numel()))
    return _table(tuple(rows), device, stream_id(device))


@functools.lru_cache(maxsize=_KEPT)
def _table(rows: tuple[tuple[int, ...], ...], device: torch.device, stream: int) -> tuple[Tensor, bool]:
    aligned = all(each % _ALIGNMENT == 0 for row in rows for each in row[:5])
    return torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True), aligned


@functools.lru_cache(maxsize=_KEPT)
def _pieces(sizes: tuple[int, ...], device: torch.device, stream: int) -> tuple[Tensor, int]:
    """Rows of (tensor index, block index within it), and their number."""
    blocks = torch.tensor([-(-size // _BLOCK) for size in sizes])
    place = torch.repeat_interleave(torch.arange(len(sizes)), blocks)
    number = torch.arange(int(blocks.sum())) - (blocks.cumsum(0) - blocks)[place]
    rows = torch.stack((place, number), dim=1).to(torch.int32).contiguous()
    return rows.to(device, non_blocking=True), len(rows)
