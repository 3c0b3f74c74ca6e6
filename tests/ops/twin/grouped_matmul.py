"""npu_grouped_matmul, without quantisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import NPU_DTYPES

LONGEST_LIST, MOST_GROUPS, LIMIT = 128, 1024, 65536


def npu_grouped_matmul(
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    *,
    bias: Sequence[torch.Tensor] | None = None,
    group_list: torch.Tensor | None = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    **others: Any,
) -> list[torch.Tensor]:
    """group_type 0: y [M, N] of x [M, K] with groups of rows, and a list of [K, N] or one [E, K, N].

    group_type 2: y [E, M, N] of x [M, K], a transposed view, and weight [K, N], with groups of K.
    """
    if others or len(x) != 1 or group_type not in (0, 2) or split_item not in (2, 3):
        raise NotImplementedError
    (left,) = x
    _check(left, weight)
    sizes = _sizes(group_list, group_list_type, left.shape[0 if group_type == 0 else 1])
    if group_type == 2:
        if len(weight) != 1 or weight[0].dim() != 2 or bias is not None or weight[0].shape[0] != left.shape[1]:
            raise ValueError("groups of what is summed over want one x, one weight and no bias")
        if not left.t().is_contiguous() or not weight[0].is_contiguous():
            raise ValueError("x must be transposed, and weight must not")
        parts = zip(left.t().split(sizes), weight[0].split(sizes), strict=True)
        # What becomes of a group without rows is not documented.
        products = [(a.float().t() @ b.float()) if len(a) else _nan(left.shape[0], b.shape[1]) for a, b in parts]
        return [torch.stack(products).to(left.dtype)]
    matrices = list(weight[0].unbind()) if len(weight) == 1 and weight[0].dim() == 3 else list(weight)
    if not left.is_contiguous() or len(matrices) != len(sizes) or any(each.dim() != 2 for each in matrices):
        raise ValueError(f"x {left.stride()} or {len(matrices)} matrices for {len(sizes)} groups")
    if any(each.shape != matrices[0].shape or each.shape[0] != left.shape[1] for each in matrices):
        raise ValueError("weights do not fit x or each other")
    if not any(all(turned(each).is_contiguous() for each in matrices) for turned in (torch.Tensor.t, torch.Tensor)):
        raise ValueError("weights are neither all transposed nor all not")
    if bias is not None:
        _check_bias(bias, left.dtype, weight)
    y = []
    for number, (rows, matrix) in enumerate(zip(left.split(sizes), matrices, strict=True)):
        product = rows.float() @ matrix.float()
        y.append(product if bias is None else product + bias[number].float())
    return [torch.cat(y).to(left.dtype)]


def _check(left: torch.Tensor, weight: Sequence[torch.Tensor]) -> None:
    if left.dim() != 2 or left.dtype not in NPU_DTYPES or any(each.dtype != left.dtype for each in weight):
        raise ValueError(f"x {left.dtype} {tuple(left.shape)} and weights of {weight[0].dtype}")
    if len(weight) > LONGEST_LIST or (left.dtype == torch.float32 and len(weight) > 1):
        raise ValueError(f"{len(weight)} weights of {left.dtype}")
    if any(size >= LIMIT for each in (left.t() if left.stride(0) == 1 else left, *weight) for size in each.shape[-1:]):
        raise ValueError("a last dimension is too large")


def _sizes(group_list: torch.Tensor | None, kind: int, total: int) -> list[int]:
    if group_list is None or group_list.dtype != torch.int64 or group_list.dim() != 1 or kind not in (0, 1):
        raise ValueError(f"group_list {group_list} of type {kind}")
    if len(group_list) > MOST_GROUPS or (kind == 1 and len(group_list) == 1):
        raise ValueError(f"{len(group_list)} groups")
    sizes = group_list.tolist() if kind == 1 else group_list.diff(prepend=group_list.new_zeros(1)).tolist()
    if any(size < 0 for size in sizes) or sum(sizes) != total:
        raise ValueError(f"groups of {sizes} rows are not {total}")
    return [int(size) for size in sizes]


def _check_bias(bias: Sequence[torch.Tensor], dtype: torch.dtype, weight: Sequence[torch.Tensor]) -> None:
    wanted = torch.float16 if dtype == torch.float16 else torch.float32
    if len(bias) != len(weight) or any(each.dtype != wanted or each.dim() != 1 for each in bias):
        raise ValueError(f"bias must be one {wanted} vector for each weight")


def _nan(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan)
