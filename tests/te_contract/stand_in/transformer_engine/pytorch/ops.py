"""Operations that can be fused: Megatron names their types, and the stand-in makes none."""

from __future__ import annotations

from typing import Any

import torch


class FusibleOperation(torch.nn.Module):
    """An operation of a sequence."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "Transformer Engine's stand-in fuses no operations: leave --use-transformer-engine-op-fuser out"
        )


class Sequential(FusibleOperation):
    """Operations in a row, which neighbours may fuse."""
