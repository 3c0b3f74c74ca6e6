"""Reference of bias_dropout_add: Megatron's steps."""

from __future__ import annotations

import torch
from torch import Tensor


def bias_dropout_add(x: Tensor, residual: Tensor, bias: Tensor | None, dropout_p: float) -> Tensor:
    if bias is not None:
        x = x + bias.to(x.dtype).reshape(-1)
    return residual + torch.nn.functional.dropout(x, p=dropout_p)
