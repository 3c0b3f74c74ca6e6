"""Implementations that l2norm is compared with; cases.py declares the cases."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mindspeed_lite.ops.case import Case
from mindspeed_lite.ops.l2norm import l2norm


def ours(case: Case) -> Callable[..., torch.Tensor]:
    """The operator, of its inputs as one list."""
    return lambda *tensors: l2norm(tensors)


def plain(case: Case) -> Callable[..., torch.Tensor]:
    """What a user without us calls, apart from the way over the host; summed in the dtype that ours is summed in."""

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
        norms = [torch.linalg.vector_norm(each, dtype=wide) for each in tensors]
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm

    return run
