"""rms_norm and layer_norm on CUDA: Triton, and PyTorch's kernels where these are better or the only ones.

On an H100 Triton's three launches take 0.55 of the device time of PyTorch's kernels and more of the host's
(`docs/benchmarks/gpu/h100.md`). A layer of small activations is bound by its host.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from mindspeed_lite.ops.dispatch import report_fallback

NARROW = (torch.float16, torch.bfloat16)
HAS_TRITON = importlib.util.find_spec("triton") is not None

_SHORT = 256  # a row too short for PyTorch's thread block
_SMALL = 1 << 23  # values of x, at a hidden size of 2048 a sequence of 4096


class _Case(Protocol):
    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def weight_dtype(self) -> torch.dtype: ...

    @property
    def zero_centered(self) -> bool: ...


def reasons(case: _Case) -> list[str]:
    """Why neither Triton nor PyTorch serves the case."""
    found = []
    if case.dtype not in (*NARROW, torch.float32, torch.float64):
        found.append(f"dtype {case.dtype}")
    if not HAS_TRITON or torch.float64 in (case.dtype, case.weight_dtype):
        because = "in float64" if HAS_TRITON else "without Triton"
        if case.weight_dtype != case.dtype:
            found.append(f"weight is {case.weight_dtype} and x {case.dtype}: {because} they must have one dtype")
        if case.zero_centered and case.weight_dtype in NARROW:
            found.append(f"{because} 1 + weight would be rounded to {case.weight_dtype} before the multiplication")
    return found


def norm(
    operator: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered: bool,
    by_torch: Callable[[Tensor], Tensor] | None,
    reference: Callable[[], Tensor],
) -> Tensor:
    """`by_torch` takes the weight, 1 added if zero-centred; None if this PyTorch has no such kernel."""
    exact = x.dtype == weight.dtype and not (zero_centered and weight.dtype in NARROW)
    if exact and by_torch is not None and _torch_is_better(x):
        return by_torch(weight + 1 if zero_centered else weight)
    if torch.compiler.is_compiling() or x.numel() == 0:
        return reference()
    from mindspeed_lite.ops import norm_kernels

    if x.shape[-1] > norm_kernels.WIDEST:
        report_fallback(operator, "cuda", (f"rows of more than {norm_kernels.WIDEST}",))
        return reference()
    function: Any = norm_kernels.Norm
    out: Tensor = function.apply(x, weight, bias, eps, zero_centered)
    return out


def _torch_is_better(x: Tensor) -> bool:
    if not HAS_TRITON or x.dtype == torch.float64 or torch.compiler.is_compiling():
        return True
    from mindspeed_lite.ops.norm_kernels import WIDEST

    return x.shape[-1] > WIDEST or (x.shape[-1] > _SHORT and x.numel() <= _SMALL)
