"""linear_cross_entropy on CPU and CUDA: matmul chunks and the kernels of cross_entropy."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mindspeed_lite.ops import cross_entropy
from mindspeed_lite.ops.linear_cross_entropy import chunks

if TYPE_CHECKING:
    from mindspeed_lite.ops.linear_cross_entropy import Case

BACKENDS = dict.fromkeys(("cpu", "cuda"), __name__)


def supported(case: Case) -> list[str]:
    reasons: list[str] = _passes(case.device).supported(cross_entropy.Case(case.device, case.dtype))
    return reasons


def linear_cross_entropy(hidden: Tensor, *arguments: Any) -> Tensor:
    return chunks.linear_cross_entropy(_kernels(hidden), hidden, *arguments)


def _kernels(hidden: Tensor) -> Any:
    passes = _passes(hidden.device.type)
    return passes.KERNELS if hidden.is_cuda else passes.kernels(hidden)


def _passes(device: str) -> Any:
    return importlib.import_module(f"mindspeed_lite.ops.cross_entropy.{device}")
