"""The definition of attention and its halves, called with the keywords of the public function."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_lite.ops import attention as package
from mindspeed_lite.ops.attention import packed as packs
from mindspeed_lite.ops.attention import prepare, reference

Tensors = tuple[torch.Tensor, ...]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    return reference.attention(q, k, v, prepare(q, k, v, **options))


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: packs.Packing, **options: Any) -> torch.Tensor:
    return reference.packed(q, k, v, packing, packs.prepare(q, k, v, packing, **options))


def forward_half(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Tensors:
    """The package's `forward`."""
    return package.forward(q, k, v, prepare(q, k, v, **options))


def backward_half(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **options: Any
) -> Tensors:
    """The package's `backward`; rest: out and lse."""
    return package.backward(dout, q, k, v, *rest, prepare(q, k, v, **options))
