"""accumulate_wgrad on CPU: oneDNN's micro-kernels add blocks of the product straight to the fp32 main gradient.

PyTorch's CPU product of 16-bit matrices has a 16-bit result, which is rounded, written, widened to fp32 in another
buffer and read again to be added. See cpu.cpp for the blocks. Where main gradient and inputs have one dtype, the
product of PyTorch accumulates already. On a processor without bf16 products the inputs are widened for the fp32 one,
which accumulates too and is the faster by far.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mindspeed_lite.ops import dispatch, native
from mindspeed_lite.ops.accumulate_wgrad import reference
from mindspeed_lite.platform import cpu_matmul

if TYPE_CHECKING:
    from mindspeed_lite.ops.accumulate_wgrad import Case

_lib = native.Library(
    Path(__file__).with_name("cpu.cpp"),
    {"accumulate_wgrad_bf16": "pplplpllli", "accumulate_wgrads_bf16": "pplplpllli", "probe": "ip"},
    uses_torch=True,
    returns_status=True,
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
    if not cpu_matmul.has_bf16():
        return []
    reasons = [] if case.contiguous else ["main_grad is not contiguous"]
    reason = kernel_unusable()
    return [*reasons, reason] if reason else reasons


def accumulate_wgrad(main_grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if main_grad.dtype == x.dtype:
        return main_grad.addmm_(dy.t(), x)
    if torch.compiler.is_compiling() or type(main_grad) is not torch.Tensor or type(x) is not torch.Tensor:
        # A compiler, or tensors without memory of their own.
        return reference.accumulate_wgrad(main_grad, dy, x)
    if not cpu_matmul.has_bf16():
        return main_grad.addmm_(dy.to(main_grad.dtype).t(), x.to(main_grad.dtype))
    reason = kernel_unusable()
    if reason is not None:
        dispatch.report_fallback("accumulate_wgrad", "cpu", (reason,))
        return reference.accumulate_wgrad(main_grad, dy, x)
    dy, x = in_rows(dy), in_rows(x)
    (rows, n), k = dy.shape, x.shape[1]
    packed = torch.empty(-(-rows // _TILE) * _TILE * k, dtype=x.dtype)
    _lib.accumulate_wgrad_bf16(
        main_grad,
        dy,
        dy.stride(0),
        x,
        x.stride(0),
        packed,
        rows,
        n,
        k,
        native.threads(rows * n * k // _DENSITY),
    )
    # PyTorch did not see the write.
    torch.autograd.graph.increment_version(main_grad)
    return main_grad


def accumulate_wgrads(
    main_grads: Sequence[torch.Tensor], dy: torch.Tensor, x: torch.Tensor, counts: Sequence[int]
) -> None:
    """main_grads[e] += dy_e^T x_e for rows that belong to one after the other, `counts` of them to each.

    fp32 contiguous main gradients of one shape, bf16 dy [T, N] and x [T, K] of ordinary tensors, where nothing in
    `kernel_unusable` is in the way.
    """
    dy, x = in_rows(dy), in_rows(x)
    (total, n), k = dy.shape, x.shape[1]
    number = len(main_grads)
    _lib.accumulate_wgrads_bf16(
        main_grads,
        native.numbers(counts),
        number,
        dy,
        dy.stride(0),
        x,
        x.stride(0),
        n,
        k,
        native.threads(total * n * k // _DENSITY),
    )
    for main_grad in main_grads:
        torch.autograd.graph.increment_version(main_grad)


def in_rows(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with its columns beside each other, copied if need be."""
    return matrix if matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1] else matrix.contiguous()


def kernel_unusable() -> str | None:
    """Why the compiled kernel serves nothing now."""
    return native.without_micro_kernel(_lib)
