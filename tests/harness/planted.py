"""Faults for the fuzz run and the drawn rows to find: each is called first in every process that tries one."""

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

    def chosen(case: Any, *tensors: Any) -> Any:
        right = choose(case, *tensors)
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


def _around_rms_norm(change: Any) -> None:
    """`change(right, x, *rest)` in the place of what `--use-fused-rmsnorm` calls."""
    from mindspeed_lite.patches.use_fused_rmsnorm import FusedRMSNorm

    FusedRMSNorm.operator = staticmethod(functools.partial(change, FusedRMSNorm.operator))


def norms_are_one_percent_off() -> None:
    _around_rms_norm(lambda right, x, *rest: right(x, *rest) * 1.01)


def a_norm_ends_the_process() -> None:
    def change(right: Any, x: torch.Tensor, *rest: Any) -> Any:
        os.abort()

    _around_rms_norm(change)


def activations_lose_a_bit() -> None:
    """Of `--recompute-activation-function`, which promises all of them."""
    from mindspeed_lite.patches._shared import recompute

    own = recompute.checkpoint_without_output

    def checkpoint_without_output() -> Any:
        found = own()
        checkpoint = found.checkpoint
        found.checkpoint = lambda function, *inputs: checkpoint(lambda *x: function(*x) * (1 + 2**-7), *inputs)
        return found

    recompute.checkpoint_without_output = checkpoint_without_output
