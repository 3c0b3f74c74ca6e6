"""`mindspeed_lite.ops.moe_router` on npu_moe_gating_top_k and npu_moe_gating_top_k_softmax, with a gradient of ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tests.npu_contract.definitions import (
    DTYPES,
    ContractCase,
    Mutation,
    Tensors,
    by_name,
    is_tensor,
)
from tests.npu_contract.recorder import Call, Tensor

NAMED = ("k_group", "group_count", "group_select_mode", "renorm", "norm_type", "routed_scaling_factor", "eps")
SIGMOID = 1


@dataclass(frozen=True)
class _Routing(ContractCase):
    """`mindspeed_lite.ops.moe_router.topk_routing` of logits [tokens, experts]."""

    name: str
    tokens: int = 24
    experts: int = 64
    topk: int = 6
    dtype: str = "bfloat16"
    scale: float | None = None

    operator = "moe_router"

    def leaves(self, device: str) -> Tensors:
        dtype = getattr(torch, self.dtype)
        return {"logits": torch.zeros(self.tokens, self.experts, dtype=dtype, device=device).requires_grad_()}

    def options(self, leaves: Tensors) -> dict[str, Any]:
        raise NotImplementedError

    def run(self, leaves: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        from mindspeed_lite.ops.moe_router import topk_routing

        return topk_routing(leaves["logits"], self.topk, **self._given(leaves))

    def result(self) -> list[Tensor]:
        shape = (self.tokens, self.experts)
        return [Tensor(self.dtype, shape, ""), Tensor("bool", shape, "")]

    def _given(self, leaves: Tensors) -> dict[str, Any]:
        return {"scaling_factor": self.scale, **self.options(leaves)}

    def _x(self) -> Tensor:
        # Scores are computed in fp32, of which only fp32 logits are a promise.
        return Tensor("float32", (self.tokens, self.experts), "")


@dataclass(frozen=True)
class Sigmoid(_Routing):
    """groups: how many, and how many of them a token may go to."""

    groups: tuple[int, int] | None = None
    biased: bool = False

    forward = "npu_moe_gating_top_k"

    def leaves(self, device: str) -> Tensors:
        bias = {"expert_bias": torch.zeros(self.experts, device=device)} if self.biased else {}
        return {**super().leaves(device), **bias}

    def options(self, leaves: Tensors) -> dict[str, Any]:
        number, chosen = self.groups or (None, None)
        given = {"score_function": "sigmoid", "num_groups": number, "group_topk": chosen}
        return {**given, "expert_bias": leaves.get("expert_bias")}

    def arguments(self) -> Mapping[str, Any]:
        number, chosen = self.groups or (1, 1)
        # A group is judged by as many experts as are taken of it.
        best = self.topk // chosen if self.groups else 1
        return {
            "x": self._x(),
            "k": self.topk,
            "bias": Tensor("float32", (self.experts,), "") if self.biased else None,
            "k_group": chosen,
            "group_count": number,
            "group_select_mode": best - 1,
            "renorm": 0,
            "norm_type": SIGMOID,
            "routed_scaling_factor": self.scale or 1.0,
            "eps": 1e-20,
        }


@dataclass(frozen=True)
class PreSoftmax(_Routing):
    forward = "npu_moe_gating_top_k_softmax"

    def options(self, leaves: Tensors) -> dict[str, Any]:
        return {"use_pre_softmax": True}

    def arguments(self) -> Mapping[str, Any]:
        return {"x": self._x(), "finished": None, "k": self.topk}


CASES = (
    Sigmoid("sigmoid"),
    Sigmoid("sigmoid float32", dtype="float32"),
    Sigmoid("sigmoid float16", dtype="float16"),
    Sigmoid("bias", biased=True, scale=2.5),
    Sigmoid("groups by two", experts=256, topk=8, groups=(8, 4), biased=True, scale=2.5),
    Sigmoid("groups by one", topk=4, groups=(8, 4)),
    Sigmoid("one token", tokens=1),
    PreSoftmax("pre-softmax"),
    PreSoftmax("pre-softmax float32", dtype="float32"),
    PreSoftmax("pre-softmax float16, one expert", dtype="float16", topk=1, scale=2.5),
)


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

MUTATIONS = {
    "scores of 16 bits": Mutation("x = logits.to(torch.float32)", "x = logits", "x is bfloat16"),
    "softmax for sigmoid": Mutation("norm_type=1", "norm_type=0", "norm_type is 0: want 1"),
    "groups by their best alone": Mutation("groups.best - 1", "0", "group_select_mode is 0: want 1"),
    "groups exchanged": Mutation(
        "k_group=groups.chosen,\n            group_count=groups.number",
        "k_group=groups.number,\n            group_count=groups.chosen",
        "k_group is 8: want 4",
    ),
    "no bias": Mutation("bias=None if expert_bias is None else expert_bias.to(torch.float32)", "bias=None", "bias is"),
    "bias of 16 bits": Mutation("expert_bias.to(torch.float32)", "expert_bias.to(logits.dtype)", "bias is bfloat16"),
    "probabilities in fp32": Mutation("probs.to(logits.dtype), experts", "probs, experts", "Expected self.dtype"),
}  # fmt: skip
