"""npu_grouped_matmul_add_."""

from __future__ import annotations

import torch


def npu_grouped_matmul_add_(
    input: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    group_list: torch.Tensor,
    *,
    transpose_x: bool = True,
    transpose_weight: bool = False,
    group_type: int = 2,
    group_list_type: int | None = 0,
) -> torch.Tensor:
    """input [E, N, K] += x^T weight for the rows of each group: x [M, N], weight [M, K]."""
    start = 0
    for group, end in enumerate(group_list.tolist()):
        input[group] += x[start:end].float().t() @ weight[start:end].float()
        start = end
    return input
