"""accumulate_wgrad on CUDA: one cuBLAS call with beta = 1.

Not under torch.compile: PyTorch's decomposition of addmm.dtype_out takes the dtype for beta.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from mindspeed_lite.ops.accumulate_wgrad import Case

_HALF = (torch.float16, torch.bfloat16)


def supported(case: Case) -> list[str]:
    if case.main_dtype == case.dtype:
        return []
    if case.dtype not in _HALF or case.main_dtype != torch.float32:
        return [f"main_grad is {case.main_dtype} and x {case.dtype}: cuBLAS takes 16-bit inputs into float32"]
    if not hasattr(torch.ops.aten.addmm, "dtype_out"):
        return [f"torch {torch.__version__} does not add a 16-bit product to an fp32 matrix"]
    if torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing():
        return [*_wrong_sums(case.dtype, "cuda")]
    return []


@functools.cache
def _wrong_sums(dtype: torch.dtype, device: str) -> tuple[str, ...]:
    """Errors of `addmm` on small integers, which need no rounding."""
    main_grad = torch.arange(256, dtype=torch.float32, device=device).view(16, 16)
    expected, ones = main_grad + 16, torch.ones(16, 16, dtype=dtype, device=device)
    try:
        found = _add_product(main_grad, ones, ones)
    except RuntimeError as error:
        return (f"addmm into fp32 fails: {error}",)
    if found is main_grad and torch.equal(main_grad, expected):
        return ()
    return (f"torch {torch.__version__} adds a 16-bit product to an fp32 matrix wrongly",)


def accumulate_wgrad(main_grad: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    if main_grad.dtype == x.dtype:
        return main_grad.addmm_(dy.t(), x)
    return _add_product(main_grad, dy, x)


def _add_product(main_grad: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    out: Tensor = torch.ops.aten.addmm.dtype_out(main_grad, dy.t(), x, torch.float32, out=main_grad)
    return out
