"""Cases of permute and unpermute, compared with Megatron's sort and scatter_add."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_lite.ops.case import Draw, OperatorCases, Work
from mindspeed_lite.ops.permute import permute, unpermute


@dataclass(frozen=True)
class Shape:
    """Tokens [tokens, hidden], each sent to `topk` of `experts`."""

    tokens: int
    hidden: int
    experts: int
    topk: int

    def __post_init__(self) -> None:
        if self.topk > self.experts:
            raise ValueError(f"topk={self.topk} of {self.experts} experts")

    def make(self, draw: Draw) -> tuple[Tensor, ...]:
        chosen = torch.rand(self.tokens, self.experts, **draw.options).topk(self.topk, 1).indices
        routing_map = torch.zeros(self.tokens, self.experts, dtype=torch.bool, device=chosen.device)
        routing_map.scatter_(1, chosen, True)
        probs = torch.rand(self.tokens, self.experts, **draw.options).mul_(routing_map)
        return draw(self.tokens, self.hidden), draw.of(probs, wide=True), routing_map.to(draw.device)

    def ours(self, x: Tensor, probs: Tensor, routing_map: Tensor) -> Tensor:
        rows, _, row_ids = permute(x, routing_map, None, self.tokens * self.topk, topk=self.topk)
        return unpermute(rows, row_ids, (self.tokens, self.hidden), probs, routing_map)

    def reference(self, x: Tensor, probs: Tensor, routing_map: Tensor) -> Tensor:
        by_expert = routing_map.t().contiguous()
        order = by_expert.reshape(-1).argsort(descending=True, stable=True)[: self.tokens * self.topk]
        token = order % self.tokens
        rows = x.index_select(0, token) * probs.t().contiguous().masked_select(by_expert).unsqueeze(-1)
        sums = torch.zeros(self.tokens, self.hidden, dtype=rows.dtype, device=x.device)
        return sums.scatter_add(0, token.unsqueeze(1).expand(-1, self.hidden), rows).to(x.dtype)

    def work(self, size: int) -> tuple[Work, Work]:
        once, rows = self.tokens * self.hidden, self.tokens * self.topk * self.hidden
        return Work(2 * (once + rows) * size, 2 * rows), Work((2 * once + 3 * rows) * size, 4 * rows)


_TIMED = ("4096x512x64x6", "2048x1024x8x2")

CASES = OperatorCases(
    "permute",
    Shape,
    correctness=("64x1024x8x2", "37x1000x12x1", "300x64x64x6"),
    cpu=_TIMED,
    accelerator=(*_TIMED, "8192x7168x256x8"),
)
