"""accumulate_wgrad on CPU: oneDNN's micro-kernels add blocks of the product straight to the fp32 main gradient.

PyTorch's CPU product of 16-bit matrices has a 16-bit result, which is rounded, written, widened to fp32 in another
buffer and read again to be added. See cpu.cpp for the blocks. Where main gradient and inputs have one dtype, the
product of PyTorch accumulates already. On a processor without bf16 products the inputs are widened for the fp32 one,
which accumulates too and is the faster by far.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mindspeed_lite.ops import native
from mindspeed_lite.ops.accumulate_wgrad import reference
from mindspeed_lite.platform import cpu_products

if TYPE_CHECKING:
    from mindspeed_lite.ops.accumulate_wgrad import Case

_lib = native.Library(
    Path(__file__).with_name("cpu.cpp"),
    {"accumulate_wgrad_bf16": "pplplpllli", "probe": "p"},
    uses_torch=True,
)

# Rows are padded to a multiple of this many, as in cpu.cpp.
_TILE = 32
# Multiplications that cost as much as an element of a pass over memory, by which `native.threads` counts.
_DENSITY = 64


def supported(case: Case) -> list[str]:
    if case.main_dtype == case.dtype:
        return []
    if (case.dtype, case.main_dtype) != (torch.bfloat16, torch.float32):
        return [f"main_grad is {case.main_dtype} and x {case.dtype}: the micro-kernel takes bfloat16 into float32"]
    if not cpu_products.has_bf16():
        return []
    reasons = [] if case.contiguous else ["main_grad is not contiguous"]
    reason = _unusable()
    return [*reasons, reason] if reason else reasons


def accumulate_wgrad(main_grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if main_grad.dtype == x.dtype:
        return main_grad.addmm_(dy.t(), x)
    if torch.compiler.is_compiling() or type(main_grad) is not torch.Tensor or type(x) is not torch.Tensor:
        # A compiler, or tensors without memory of their own.
        return reference.accumulate_wgrad(main_grad, dy, x)
    if not cpu_products.has_bf16():
        return main_grad.addmm_(dy.to(main_grad.dtype).t(), x.to(main_grad.dtype))
    if dy.stride(1) != 1 or dy.stride(0) < dy.shape[1]:
        dy = dy.contiguous()
    if x.stride(1) != 1 or x.stride(0) < x.shape[1]:
        x = x.contiguous()
    (rows, n), k = dy.shape, x.shape[1]
    packed = torch.empty(-(-rows // _TILE) * _TILE * k, dtype=x.dtype)
    _lib.accumulate_wgrad_bf16(
        main_grad.data_ptr(),
        dy.data_ptr(),
        dy.stride(0),
        x.data_ptr(),
        x.stride(0),
        packed.data_ptr(),
        rows,
        n,
        k,
        native.threads(rows * n * k // _DENSITY),
    )
    # PyTorch did not see the write.
    torch.autograd.graph.increment_version(main_grad)
    return main_grad


@functools.cache
def _unusable() -> str | None:
    """Why the compiled kernel serves nothing here."""
    reason = _lib.unusable()
    if reason is not None:
        return reason
    right = ctypes.c_int32(0)
    _lib.probe(ctypes.addressof(right))
    return None if right.value else "oneDNN has no bfloat16 micro-kernel for this processor"
