"""Fused bias, dropout and residual addition after attention and the MLP of a transformer layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_lite.ops.bias_dropout_add import reference
from mindspeed_lite.ops.dispatch import Operator

__all__ = ["OPERATOR", "Case", "bias_dropout_add"]


class Case(NamedTuple):
    device: str
    dtype: torch.dtype
    bias_dtype: torch.dtype | None


# On GPUs Megatron fuses this with torch.compile.
OPERATOR = Operator("bias_dropout_add", reference.bias_dropout_add, batch_dependence={"reference": "", "cpu": ""})


def bias_dropout_add(x: Tensor, residual: Tensor, bias: Tensor | None = None, dropout_p: float = 0.0) -> Tensor:
    """y = residual + dropout(x + bias).

    x, residual, y: [..., H] in one shape and dtype; bias: H elements in any shape. Backends draw differently from the
    device's default generator and save only its state. The bias gradient is summed in fp32. Raises ValueError.

    Replaces `megatron.core.fusions.fused_bias_dropout:bias_dropout_add_fused_train`.
    """
    return OPERATOR.choose(_case(x, residual, bias, dropout_p), x, residual)(x, residual, bias, dropout_p)


def _case(x: Tensor, residual: Tensor, bias: Tensor | None, dropout_p: float) -> Case:
    if not x.dim() or x.shape != residual.shape or x.dtype != residual.dtype:
        raise ValueError(
            f"bias_dropout_add: want x [..., H] and a residual of its shape and dtype, not {list(x.shape)} {x.dtype} "
            f"and {list(residual.shape)} {residual.dtype}"
        )
    if bias is not None and bias.numel() != x.shape[-1]:
        raise ValueError(f"bias_dropout_add: want bias [{x.shape[-1]}] for x {list(x.shape)}, not {list(bias.shape)}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"bias_dropout_add: dropout_p is a share from 0 to 1, not {dropout_p}")
    return Case(x.device.type, x.dtype, None if bias is None else bias.dtype)
