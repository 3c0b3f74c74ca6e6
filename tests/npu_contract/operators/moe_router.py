"""`mindspeed_lite.ops.moe_router` on npu_moe_gating_top_k and npu_moe_gating_top_k_softmax, with a gradient of ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_lite.ops.moe_router import topk_routing
from tests.npu_contract.definitions import DTYPES, Call, Make, OperatorCall, by_name, is_tensor

NAMED = ("k_group", "group_count", "group_select_mode", "renorm", "norm_type", "routed_scaling_factor", "eps")
SIGMOID = 1


def _routing(
    topk: int, tokens: int = 24, experts: int = 64, dtype: str = "float32", biased: bool = False, **options: Any
) -> OperatorCall:
    def call(make: Make) -> Any:
        bias = {"expert_bias": make(experts, dtype="float32", grad=False)} if biased else {}
        given = {**({} if "use_pre_softmax" in options else {"score_function": "sigmoid"}), **options, **bias}
        return topk_routing(make(tokens, experts, dtype=dtype), topk, **given)

    return call


# Groups are judged by their two best experts, or by their best.
CALLS = {
    "bias": _routing(6, biased=True, scaling_factor=2.5),
    "groups by two": _routing(8, experts=256, biased=True, num_groups=8, group_topk=4, scaling_factor=2.5),
    "groups by one": _routing(4, num_groups=8, group_topk=4),
    "one token": _routing(6, tokens=1, dtype="float16"),
    "pre-softmax, one expert": _routing(1, use_pre_softmax=True, scaling_factor=2.5),
}


# ---- what is documented ----


def gating_top_k(call: Call) -> Iterator[str]:
    """npu_moe_gating_top_k(x, k, *, bias=, k_group=, group_count=, group_select_mode=, renorm=, norm_type=, out_flag=,
    routed_scaling_factor=, eps=) -> y, expert_idx, norm

    x [T, E]; bias [E] in its dtype; y [T, k] in it too, expert_idx [T, k] int32, norm [T, E] fp32. What norm_type 0,
    the softmax, divides by is documented in two ways.
    """
    a = call.arguments
    x, k, bias, groups, chosen = a["x"], a["k"], a["bias"], a["group_count"], a["k_group"]
    yield from by_name(call, *NAMED)
    if x.dtype not in DTYPES or x.dim != 2:
        yield f"x is {x}: want two dimensions of one of {', '.join(DTYPES)}"
        return
    tokens, experts = x.shape
    if bias is not None:
        yield from is_tensor("bias", bias, x.dtype, (experts,))
    if groups < 1 or experts % groups or experts // groups <= 2 or -(-experts // groups // 32) * 32 * groups > 2048:
        yield f"{groups} groups of {experts} experts: want more than 2 in each, and at most 2048 in all, filled up"
        return
    if not 1 <= chosen <= groups or not 1 <= k <= chosen * (experts // groups):
        yield f"k is {k} and k_group {chosen} of {groups} groups of {experts // groups}"
    if a["group_select_mode"] not in (0, 1) or a["renorm"] != 0:
        yield f"group_select_mode is {a['group_select_mode']} and renorm {a['renorm']}: want 0 or 1, and 0"
    if a["norm_type"] != SIGMOID:
        yield f"norm_type is {a['norm_type']}: only 1, the sigmoid, is documented clearly"
    if call.results is not None:
        yield from is_tensor("result 0 (y)", call.results[0], x.dtype, (tokens, k))
        yield from is_tensor("result 1 (expert_idx)", call.results[1], "int32", (tokens, k))


def gating_top_k_softmax(call: Call) -> Iterator[str]:
    """npu_moe_gating_top_k_softmax(x, finished=, k=) -> y, expert_idx, row_idx; x [T, E], the results [T, k]"""
    a = call.arguments
    x, k = a["x"], a["k"]
    yield from by_name(call, "finished", "k")
    if x.dtype not in DTYPES or x.dim not in (2, 3):
        yield f"x is {x}: want two or three dimensions of one of {', '.join(DTYPES)}"
        return
    if not 0 < k <= min(x.shape[-1], 1024):
        yield f"k is {k} of {x.shape[-1]} experts: want at most 1024"
    if a["finished"] is not None:
        yield "finished is given: no row is"
    if call.results is not None:
        shape = (*x.shape[:-1], k)
        yield from is_tensor("result 0 (y)", call.results[0], x.dtype, shape)
        yield from is_tensor("result 1 (expert_idx)", call.results[1], "int32", shape)


CONTRACTS = {"npu_moe_gating_top_k": gating_top_k, "npu_moe_gating_top_k_softmax": gating_top_k_softmax}
