"""l2norm on CUDA through PyTorch's norms of a list, a launch for many tensors, and one of those norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mindspeed_lite.ops.l2norm import Case


def supported(case: Case) -> list[str]:
    return ["tensors of several dtypes"] if case.dtype is None else []


def l2norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    norms = torch._foreach_norm(list(tensors), 2, dtype=dtype)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm
