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
    if x.dtype not in (torch.float16, torch.bfloat16) or weight.dtype != x.dtype or input.dtype != torch.float32:
        raise ValueError(f"dtypes {input.dtype}, {x.dtype} and {weight.dtype}")
    if (transpose_x, transpose_weight, group_type, group_list_type) != (True, False, 2, 0):
        raise ValueError("only transposed x, groups along the rows and ends of groups are documented")
    if group_list.dtype != torch.int64 or group_list.shape != input.shape[:1]:
        raise ValueError(f"group_list {group_list.dtype} {tuple(group_list.shape)} for {input.shape[0]} groups")
    if not (input.is_contiguous() and x.is_contiguous() and weight.is_contiguous()):
        raise ValueError("a view with strides")
    if input.shape[1:] != (x.shape[1], weight.shape[1]) or x.shape[0] != weight.shape[0]:
        raise ValueError(f"{tuple(input.shape)}, {tuple(x.shape)} and {tuple(weight.shape)} do not fit")
    start = 0
    for group, end in enumerate(group_list.tolist()):
        if end < start or end > x.shape[0]:
            raise ValueError(f"{group_list.tolist()} are no ends of groups of {x.shape[0]} rows")
        input[group] += x[start:end].float().t() @ weight[start:end].float()
        start = end
    if start != x.shape[0]:
        input.fill_(torch.nan)  # what becomes of rows in no group is not documented
    return input
