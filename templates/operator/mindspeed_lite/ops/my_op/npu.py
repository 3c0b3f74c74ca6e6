"""my_op on Ascend NPUs through torch_npu's fused operator, which brings its own backward."""

from __future__ import annotations

import torch
import torch_npu  # type: ignore[import-not-found, import-untyped, unused-ignore]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def my_op(x: torch.Tensor) -> torch.Tensor:
    # The operator documents 1 to 8 dimensions.
    rows = x if 1 <= x.dim() <= 8 else x.reshape(-1)
    y: torch.Tensor = torch_npu.npu_fast_gelu(rows)
    return y.view(x.shape)
