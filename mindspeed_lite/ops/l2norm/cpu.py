"""l2norm on CPU: PyTorch's norm of each tensor, which reads memory as fast as can be, asked for in one call.

The bits are those of the definition, and of Megatron without this operator; what is left out is Python's part in
hundreds of small norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mindspeed_lite.ops.l2norm import reference

if TYPE_CHECKING:
    from mindspeed_lite.ops.l2norm import Case


def supported(case: Case) -> list[str]:
    return []


def l2norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    norms = torch._foreach_norm(list(tensors), 2, dtype=reference.dtype_of(tensors))
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm
