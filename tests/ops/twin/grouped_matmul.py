"""npu_grouped_matmul, without quantisation."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def npu_grouped_matmul(
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    *,
    bias: Sequence[torch.Tensor] | None = None,
    group_list: torch.Tensor,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
) -> list[torch.Tensor]:
    """group_type 0: y [M, N] of x [M, K] with groups of rows, and a list of [K, N] or one [E, K, N].

    group_type 2: y [E, M, N] of x [M, K], a transposed view, and weight [K, N], with groups of K.
    """
    (left,) = x
    sizes = group_list.tolist() if group_list_type == 1 else group_list.diff(prepend=group_list.new_zeros(1)).tolist()
    if group_type == 2:
        parts = zip(left.t().split(sizes), weight[0].split(sizes), strict=True)
        # What becomes of a group without rows is not documented.
        nothing = torch.full((left.shape[0], weight[0].shape[1]), torch.nan)
        products = [a.float().t() @ b.float() if len(a) else nothing for a, b in parts]
        return [torch.stack(products).to(left.dtype)]
    matrices = list(weight[0].unbind()) if len(weight) == 1 and weight[0].dim() == 3 else list(weight)
    y = []
    for number, (rows, matrix) in enumerate(zip(left.split(sizes), matrices, strict=True)):
        product = rows.float() @ matrix.float()
        y.append(product if bias is None else product + bias[number].float())
    return [torch.cat(y).to(left.dtype)]
