"""Reference of bias_dropout_add: Megatron's steps."""

from __future__ import annotations

import torch


def bias_dropout_add(
    x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None, dropout_p: float
) -> torch.Tensor:
    if bias is not None:
        x = x + bias.to(x.dtype).reshape(-1)
    return residual + torch.nn.functional.dropout(x, p=dropout_p)
