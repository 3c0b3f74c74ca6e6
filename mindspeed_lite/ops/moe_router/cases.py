"""Cases of moe_router, compared with its reference, whose steps are Megatron's without Transformer Engine.

Output: probabilities [tokens, experts]. Work counts logits, probabilities, map and gradients; per logit 8 operations
per direction, and a comparison per chosen expert and group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mindspeed_lite.ops.case import Draw, OperatorCases, Work
from mindspeed_lite.ops.moe_router import form_of, topk_routing
from mindspeed_lite.ops.moe_router.reference import moe_router


@dataclass(frozen=True)
class Shape:
    """Logits [tokens, experts]; groups, group_topk: 0 for no limit; pre: softmax before the choice."""

    tokens: int
    experts: int
    k: int
    scores: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    pre: bool = False
    groups: int = 0
    group_topk: int = 0
    bias: bool = False

    def __post_init__(self) -> None:
        groups = self.groups
        if groups and (self.experts % groups or not 0 < self.group_topk <= min(groups, self.k)):
            raise ValueError(f"k={self.k} of {self.experts} experts in {self.group_topk} of {groups} groups")
        if self.k > self.experts:
            raise ValueError(f"k={self.k} of {self.experts} experts")

    def make(self, draw: Draw) -> tuple[Tensor, ...]:
        """Logits without ties in a row, exact in any dtype; with `bias` the expert bias."""
        experts = self.experts
        places = torch.rand(self.tokens, experts, **draw.options).argsort(dim=1)
        # Power-of-two steps through about [-2, 2].
        logits = draw.of((places - experts // 2) * (4.0 / (1 << max(experts - 1, 0).bit_length())))
        if not self.bias:
            return (logits,)
        order = torch.randperm(experts, **draw.options)
        return logits, draw.of(
            torch.linspace(-0.1, 0.1, experts, device=order.device)[order], wide=True, gradient=False
        )

    def ours(self, logits: Tensor, expert_bias: Tensor | None = None) -> Tensor:
        return topk_routing(logits, self.k, expert_bias=expert_bias, **_options(self))[0]

    def reference(self, logits: Tensor, expert_bias: Tensor | None = None) -> Tensor:
        return moe_router(logits, expert_bias, form_of(self.experts, self.k, **_options(self)))[0]

    def work(self, size: int) -> tuple[Work, Work]:
        count = self.tokens * self.experts
        forward = Work(count * (2 * size + 1), count * (8 + self.k + self.groups))
        return forward, Work((count + self.tokens * self.k) * size, 8 * count)


def _options(shape: Shape) -> dict[str, Any]:
    groups = {"num_groups": shape.groups or None, "group_topk": shape.group_topk or None}
    return {"use_pre_softmax": shape.pre, "score_function": shape.scores, **groups}


# Mixtral, a 64-expert model in both ways, DeepSeek-V3.
_DEEPSEEK = ",scores=sigmoid,groups=8,group_topk=4,bias=1"
_TIMED = ("2048x8x2", "4096x64x6", "4096x64x6,pre=1", f"8192x256x8{_DEEPSEEK}")

CASES = OperatorCases(
    "moe_router",
    Shape,
    correctness=(
        "64x64x6,pre=1",
        f"100x64x8{_DEEPSEEK}",
        "37x60x4,scores=sigmoid",
    ),
    not_on_npu=("24x48x4", "24x48x4,pre=1,groups=4,group_topk=2", "24x48x1,scores=sqrtsoftplus"),
    cpu=_TIMED,
    accelerator=(*_TIMED, f"32768x256x8{_DEEPSEEK}"),
)
