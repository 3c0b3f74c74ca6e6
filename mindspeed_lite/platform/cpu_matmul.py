"""Runs 16-bit matmuls in fp32 on CPUs without 16-bit matmul instructions.

oneDNN needs AVX-512 for bf16 and AVX-512 FP16 for fp16; PyTorch's own loop is 6 to 300 times slower than fp32.
`install` overrides CPU kernels at about 3 µs a call. Results are rounded once, in parts of at most 64 MB.
`MINDSPEED_LITE_CPU_MATMUL=torch` keeps PyTorch's matmuls.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import choice

CPU_MATMUL_VARIABLE = "MINDSPEED_LITE_CPU_MATMUL"
FP32 = "fp32"
TORCH = "torch"

_log = logging.getLogger("mindspeed_lite")

_PART = 1 << 24

_widened: frozenset[torch.dtype] = frozenset()
_library: Any = None


@functools.cache
def has_bf16() -> bool:
    known = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    if known is not None:
        return bool(known())
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


@functools.cache
def has_fp16() -> bool:
    known = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    return bool(known()) if known is not None else False


def widened() -> frozenset[torch.dtype]:
    return _widened


def install() -> Callable[[], None]:
    """Run unsupported 16-bit matmuls in fp32; return an undo callable."""
    global _widened, _library
    slow = frozenset(dtype for dtype, has in ((torch.bfloat16, has_bf16), (torch.float16, has_fp16)) if not has())
    get_kernel: Any = getattr(torch.library, "get_kernel", None)
    if _widened or not slow or choice(CPU_MATMUL_VARIABLE, (FP32, TORCH)) == TORCH:
        return lambda: None
    if get_kernel is None:
        _log.warning("16-bit matrix products are slow here: torch %s has no library.get_kernel", torch.__version__)
        return lambda: None
    _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    overrides = {}
    for overload in _OVERLOADS:
        plain = "bmm" if "bmm" in overload else "mm"
        multiply, original = (get_kernel(f"aten::{name}", "CPU") for name in (plain, overload))
        overrides[overload] = _override(overload, slow, multiply, original)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for overload, run in overrides.items():
            _library.impl(overload, run, "CPU", with_keyset=True, allow_override=True)
    _widened = slow

    def undo() -> None:
        global _widened, _library
        _library._destroy()
        _widened, _library = frozenset(), None

    return undo


_OVERLOADS = ("mm", "mm.out", "bmm", "bmm.out", "addmm", "addmm.out", "addmm_", "baddbmm", "baddbmm.out", "baddbmm_")


def _override(overload: str, slow: frozenset[torch.dtype], multiply: Any, original: Any) -> Callable[..., Any]:
    terms, in_place = int("add" in overload), overload.endswith("_")  # terms: arguments before the matrices

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        a, b = args[terms], args[terms + 1]
        if a.dtype not in slow:
            return original.call_boxed(keys, *args, **kwargs)
        out = args[0] if in_place else kwargs.get("out")
        if not _fit(a, b, out):
            return original.call_boxed(keys, *args, **kwargs)
        if out is None:
            out = a.new_empty((*a.shape[:-1], b.shape[-1]))
        beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
        added = args[0].expand(out.shape) if terms and beta != 0 else None
        # Parts of a batch, or rows of a matmul whose second matrix is widened once.
        batched, wide = out.dim() == 3, b if out.dim() == 3 else b.float()
        for part in _parts(out):
            result = multiply.call_boxed(keys, a[part].float(), wide[part].float() if batched else wide)
            if alpha != 1:
                result *= alpha
            if added is not None:
                result.add_(added[part], alpha=beta)
            out[part].copy_(result)
        return out

    return run


def _fit(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> bool:
    if a.dtype != b.dtype or a.dim() != b.dim() or a.dim() < 2:
        return False
    if a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        return False
    return out is None or (out.dtype == a.dtype and out.shape == (*a.shape[:-1], b.shape[-1]))


def _parts(out: torch.Tensor) -> Iterator[slice]:
    count = out.shape[0]
    step = max(1, _PART * count // max(out.numel(), 1))
    return (slice(start, start + step) for start in range(0, count, step))
