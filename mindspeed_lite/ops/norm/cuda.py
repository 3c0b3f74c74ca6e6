"""rms_norm and layer_norm on CUDA: Triton, and PyTorch's kernels where these are better or the only ones.

On an H100 Triton's three launches take 0.55 of the device time of PyTorch's kernels and more of the host's
(`docs/benchmarks/gpu/h100.md`). A layer of small activations is bound by its host.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from mindspeed_lite.ops.batch_invariant import is_required
from mindspeed_lite.ops.dispatch import report_fallback
from mindspeed_lite.ops.norm import Case, reference

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NARROW = (torch.float16, torch.bfloat16)
HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_RMS_NORM = hasattr(torch.ops.aten, "_fused_rms_norm")

WIDEST = 16384  # values of a row in Triton's kernels
_SHORT = 256  # a row too short for PyTorch's thread block
_SMALL = 1 << 23  # values of x, at a hidden size of 2048 a sequence of 4096


def supported(case: Case) -> list[str]:
    """Why neither Triton nor PyTorch serves the case."""
    found = []
    if not HAS_TRITON or torch.float64 in (case.dtype, case.weight_dtype):
        because = "in float64" if HAS_TRITON else "without Triton"
        if case.weight_dtype != case.dtype:
            found.append(f"weight is {case.weight_dtype} and x {case.dtype}: {because} they must have one dtype")
        if case.zero_centered and case.weight_dtype in NARROW:
            found.append(f"{because} 1 + weight would be rounded to {case.weight_dtype} before the multiplication")
    if not (case.has_bias or HAS_RMS_NORM) and (not HAS_TRITON or case.dtype == torch.float64):
        found.append(f"torch {torch.__version__} has no fused rms_norm kernel")
    return found


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    exact = x.dtype == weight.dtype and not (zero_centered and weight.dtype in NARROW)
    if exact and (bias is not None or HAS_RMS_NORM) and _torch_is_better(x):
        scale = weight + 1 if zero_centered else weight
        if bias is None:
            return torch.nn.functional.rms_norm(x, weight.shape, scale, eps)
        return torch.nn.functional.layer_norm(x, weight.shape, scale, bias, eps)
    if x.shape[-1] > WIDEST:
        report_fallback("rms_norm" if bias is None else "layer_norm", "cuda", (f"rows of more than {WIDEST}",))
    elif not torch.compiler.is_compiling() and x.numel():
        from mindspeed_lite.ops.norm import kernels

        return kernels.norm(x, weight, bias, eps, zero_centered)
    return reference.norm(x, weight, bias, eps, zero_centered)


def _torch_is_better(x: Tensor) -> bool:
    if not HAS_TRITON or x.dtype == torch.float64 or torch.compiler.is_compiling():
        return True
    if is_required():
        return False
    return x.shape[-1] > WIDEST or (x.shape[-1] > _SHORT and x.numel() <= _SMALL)
