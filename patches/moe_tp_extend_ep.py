"""`--moe-tp-extend-ep`: tensor-parallel ranks hold whole experts (MindSpeed's flag).

Expert parallelism becomes EP x TP: larger GEMMs and no gather inside an expert. Sets Megatron's
`expert_tensor_parallel_size` and `expert_model_parallel_size` before validation; changes no code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_lite.engine import Context, Feature

from ._shared import moe


def _sizes(context: Context) -> tuple[int, int]:
    return context.arg("tensor_model_parallel_size", 1) or 1, context.arg("expert_model_parallel_size", 1) or 1


def _why_not(context: Context) -> list[str]:
    if context.host_args is None:
        return ["in Python, set expert_tensor_parallel_size=1 and the larger expert_model_parallel_size yourself"]
    reasons = moe.has_experts(context)
    experts = context.arg("num_experts", None)
    tensor, expert = _sizes(context)
    if not reasons and experts % (tensor * expert):
        reasons.append(
            f"--num-experts {experts} cannot be divided among --tensor-model-parallel-size {tensor} x "
            f"--expert-model-parallel-size {expert} = {tensor * expert} ranks"
        )
    if tensor == 1:
        reasons.append("--tensor-model-parallel-size 1: there is nothing to extend by")
    given = context.arg("expert_tensor_parallel_size", None)
    if "expert_tensor_parallel_size" in context.explicit:
        reasons.append(f"--expert-tensor-parallel-size {given} is given: say only one of the two")
    return reasons


def _arguments(context: Context) -> Mapping[str, Any]:
    tensor, expert = _sizes(context)
    return {"expert_tensor_parallel_size": 1, "expert_model_parallel_size": tensor * expert}


FEATURE = Feature(
    name="moe_tp_extend_ep",
    summary="tensor-parallel ranks hold whole experts",
    numerics="ulp",
    theme="experts",
    condition=_why_not,
    not_auto="it changes which rank holds which expert: enable it explicitly with its flag",
    arguments=_arguments,
    patches=(),
)
