"""grouped_matmul on Ascend NPUs: npu_grouped_matmul, which has no autograd of its own.

group_type 0 groups rows of one untransposed x [T, K]. Weights: up to 128 float16 or bfloat16 matrices, or one tensor
[E, K, N] for up to 1024 groups (float32: only this); either may be transposed views. Separate parameters are copied
only for float32 and above 128 experts.

group_type 2 groups the reduction: x is a transposed view [N, T], the result [E, N, K]. Groups without rows are
undocumented: they are overwritten with zeros.

group_list_type 1 (counts) needs two groups: one expert uses a plain matmul. Biases need a list of weights, and are
float32 for bfloat16. Last dimensions in memory are below 65536.

Megatron's buffers do not hold the main gradients of one layer's experts side by side, as npu_grouped_matmul_add_ wants
them: they are added one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch_npu  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from mindspeed_lite.ops.accumulate_wgrad import accumulate_wgrad
from mindspeed_lite.ops.grouped_matmul import Case

Tensors = Sequence[Tensor]

COUNTS_ON_HOST = False
_HALF = (torch.float16, torch.bfloat16)
DTYPES = (*_HALF, torch.float32)
_LONGEST_LIST = 128
_MOST_GROUPS = 1024
_WIDTH_LIMIT = 65536


def supported(case: Case) -> list[str]:
    reasons = []
    if case.experts > _MOST_GROUPS:
        reasons.append(f"{case.experts} experts: npu_grouped_matmul takes {_MOST_GROUPS} groups")
    if case.widest >= _WIDTH_LIMIT:
        reasons.append(f"a dimension of {case.widest}: npu_grouped_matmul takes less than {_WIDTH_LIMIT}")
    if case.biased and case.experts > 1 and (case.dtype not in _HALF or case.experts > _LONGEST_LIST):
        reasons.append(
            f"biases of {case.experts} experts in {case.dtype}: npu_grouped_matmul takes them beside a list of "
            f"weights, of 16 bits and up to {_LONGEST_LIST}"
        )
    return reasons


def weight_gradients(dy: Tensor, x: Tensor, counts: Tensor) -> Tensors:
    if len(counts) == 1:
        return (dy.t() @ x,)
    found: Tensor = torch_npu.npu_grouped_matmul(
        [dy.contiguous().t()],  # [N, T]
        [x.contiguous()],  # [T, K]
        group_list=counts,
        split_item=3,
        group_type=2,
        group_list_type=1,
    )[0]
    return found.masked_fill_(counts.eq(0).view(-1, 1, 1), 0.0).unbind()


def accumulate_weight_gradients(main_grads: Tensors, dy: Tensor, x: Tensor, counts: Tensor) -> None:
    if len(main_grads) == 1:
        accumulate_wgrad(main_grads[0], dy, x)
        return
    for main_grad, dw in zip(main_grads, weight_gradients(dy, x, counts), strict=True):
        main_grad.add_(dw)


def grouped_matmul(x: Tensor, weights: Tensors, counts: Tensor, biases: Tensors | None, transposed: bool) -> Tensor:
    if len(weights) == 1:
        weight = weights[0].t() if transposed else weights[0]
        return x @ weight if biases is None else torch.addmm(biases[0], x, weight)
    is_list = x.dtype in _HALF and len(weights) <= _LONGEST_LIST
    matrices = [each.contiguous() for each in weights] if is_list else [torch.stack([*weights])]
    if biases is not None:
        biases = [each.float() if each.dtype == torch.bfloat16 else each for each in biases]
    y: Tensor = torch_npu.npu_grouped_matmul(
        [x.contiguous()],
        [each.transpose(-2, -1) if transposed else each for each in matrices],
        bias=biases,
        group_list=counts,
        split_item=2,
        group_type=0,
        group_list_type=1,
    )[0]
    return y
