"""accumulate_wgrad on Ascend NPUs: npu_grouped_matmul_add_ with all rows in one group."""

from __future__ import annotations

import torch
import torch_npu  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from mindspeed_lite.ops.accumulate_wgrad import Case


def supported(case: Case) -> list[str]:
    if case.main_dtype == case.dtype:
        return []
    reasons = []
    if case.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"dtype {case.dtype}: npu_grouped_matmul_add_ takes float16 and bfloat16")
    if case.main_dtype != torch.float32:
        reasons.append(f"main_grad is {case.main_dtype}: npu_grouped_matmul_add_ accumulates in float32")
    if not case.contiguous:
        reasons.append("main_grad is not contiguous")
    if not hasattr(torch_npu, "npu_grouped_matmul_add_"):
        reasons.append("this torch_npu has no npu_grouped_matmul_add_")
    return reasons


def accumulate_wgrad(main_grad: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    if main_grad.dtype == x.dtype:
        return main_grad.addmm_(dy.t(), x)
    torch_npu.npu_grouped_matmul_add_(
        main_grad.view(1, *main_grad.shape),  # [1, N, K]
        dy.contiguous(),  # [M, N], transposed by the operator
        x.contiguous(),  # [M, K]
        # Created on the device: no transfer.
        torch.full((1,), dy.shape[0], dtype=torch.int64, device=dy.device),
        transpose_x=True,
        transpose_weight=False,
        group_type=2,
        # group_list_type, missing in torch_npu 2.7.1, defaults to 0: group ends.
    )
    return main_grad
