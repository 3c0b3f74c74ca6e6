"""Faults for the fuzz run to find: each is called first in every worker of it."""

from __future__ import annotations

import os
from typing import Any

import torch

from mindspeed_lite.ops import dispatch


def _around(change: Any) -> None:
    """rms_norm's backend for the CPU, its output changed."""
    found = dispatch.operator("rms_norm")
    choose = found.choose

    def chosen(case: Any) -> Any:
        right = choose(case)
        # The definition stays right.
        return right if found._forced == dispatch.REFERENCE else lambda x, *rest: change(right(x, *rest), x)

    found.choose = chosen  # type: ignore[method-assign]


def odd_widths_without_gradient() -> None:
    def change(y: Any, x: torch.Tensor) -> Any:
        return y if x.shape[-1] % 2 == 0 or isinstance(y, tuple) else y.detach() + 0 * x

    _around(change)


def bf16_ends_the_process() -> None:
    def change(y: Any, x: torch.Tensor) -> Any:
        if x.dtype == torch.bfloat16:
            os.abort()
        return y

    _around(change)


def strides_hang() -> None:
    def change(y: Any, x: torch.Tensor) -> Any:
        while not x.is_contiguous():
            pass
        return y

    _around(change)
