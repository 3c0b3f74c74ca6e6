"""Faults for the fuzz run to find: each is called first in every worker of it."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from mindspeed_lite.ops import dispatch


def _around(change: Any) -> None:
    """`change(right, x, *rest)` in the place of what serves rms_norm on the CPU."""
    found = dispatch.operator("rms_norm")
    choose = found.choose

    def chosen(case: Any) -> Any:
        right = choose(case)
        # The definition stays right.
        return right if found._forced == dispatch.REFERENCE else functools.partial(change, right)

    found.choose = chosen  # type: ignore[method-assign]


def odd_widths_without_gradient() -> None:
    def change(right: Any, x: torch.Tensor, *rest: Any) -> Any:
        return right(x, *rest) if x.shape[-1] % 2 == 0 else right(x.detach(), *rest) + 0 * x

    _around(change)


def bf16_ends_the_process() -> None:
    def change(right: Any, x: torch.Tensor, *rest: Any) -> Any:
        if x.dtype == torch.bfloat16:
            os.abort()
        return right(x, *rest)

    _around(change)
