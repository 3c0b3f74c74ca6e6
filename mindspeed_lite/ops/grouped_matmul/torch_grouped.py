"""grouped_matmul through torch.nn.functional.grouped_mm.

It needs stacked bf16 weights, 16-byte rows, no bias, and compute capability 9+. Weight gradients use our kernel:
grouped_mm cannot accumulate and does not document zeros for an expert without rows.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_lite.ops.grouped_matmul.autograd import stacked

Tensors = Sequence[Tensor]

_ALIGNMENT = 16

_log = logging.getLogger("mindspeed_lite")


def serves(x: Tensor, weights: Tensors, biases: Tensors | None) -> bool:
    """True if grouped_mm supports the call; logs once why not for stacked weights."""
    if len(weights) < 2 or stacked(weights) is None:
        return False
    reasons = list(_missing())
    if x.dtype != torch.bfloat16:
        reasons.append(f"grouped_mm takes bfloat16, not {x.dtype}")
    if biases is not None:
        reasons.append("grouped_mm takes no bias")
    if any(size * x.element_size() % _ALIGNMENT for size in weights[0].shape):
        reasons.append(f"grouped_mm wants rows of a multiple of {_ALIGNMENT} bytes, not {list(weights[0].shape)}")
    elif weights[0].data_ptr() % _ALIGNMENT or x.data_ptr() % _ALIGNMENT:
        reasons.append(f"grouped_mm wants tensors that begin at a multiple of {_ALIGNMENT} bytes")
    if reasons:
        _log_once("; ".join(reasons))
    return not reasons


def product(x: Tensor, weights: Tensors, counts: Tensor, transposed: bool) -> Tensor:
    """y [T, N] of x [T, K] and weights [E, N, K] or [E, K, N]; counts [E] on the device."""
    together = stacked([weight.detach() for weight in weights])
    assert together is not None
    grouped: Any = torch.nn.functional.grouped_mm  # type: ignore[attr-defined, unused-ignore]
    ends = counts.cumsum(0, dtype=torch.int32)
    y: Tensor = grouped(x.contiguous(), together.transpose(1, 2) if transposed else together, offs=ends)
    return y


@functools.cache
def _log_once(reasons: str) -> None:
    _log.info("grouped_matmul: the Triton kernel serves, not torch's grouped_mm: %s", reasons)


@functools.cache
def _missing() -> tuple[str, ...]:
    if not hasattr(torch.nn.functional, "grouped_mm"):
        return (f"torch {torch.__version__} has no grouped_mm",)
    if torch.version.hip is not None or not torch.cuda.is_available():
        return ("grouped_mm's kernels are for CUDA",)
    if torch.cuda.get_device_capability() < (9, 0):
        return ("grouped_mm's kernels are for compute capability 9.0 and later",)
    return ()
