"""Cases of linear_log_prob, compared with a linear layer and log_softmax in fp32. Output: [2, rows], or [1, rows]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_lite.ops.case import Draw, OperatorCases
from mindspeed_lite.ops.linear_cross_entropy import cases
from mindspeed_lite.ops.linear_log_prob import linear_log_prob


@dataclass(frozen=True)
class Shape(cases.Shape):
    """x [rows, hidden], weight [vocabulary, hidden]; every third target is ignored. cap: 0 for none."""

    temperature: float = 1.0
    cap: float = 0.0
    entropy: bool = False

    def make(self, draw: Draw) -> tuple[Tensor, ...]:
        x, weight, target = super().make(draw)
        target[2::3] = -100
        return x, weight, target

    def ours(self, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        log_prob, entropy = linear_log_prob(
            x, weight, target, temperature=self.temperature, soft_cap=self.cap or None, entropy=self.entropy
        )
        return torch.stack([each for each in (log_prob, entropy) if each is not None])

    def reference(self, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(x, weight)
        if self.cap:
            logits = (logits / self.cap).tanh() * self.cap
        if self.temperature != 1.0:
            logits = logits / self.temperature
        wide = logits if logits.dtype == torch.float64 else logits.float()
        log_p = wide.log_softmax(-1)
        found = [log_p.gather(-1, target.clamp(min=0)[:, None])[:, 0]]
        if self.entropy:
            found.append(-(log_p.exp() * log_p).sum(-1))
        return torch.stack(found) * (target >= 0)


CASES = OperatorCases(
    "linear_log_prob",
    Shape,
    correctness=("24x16x48", "64x64x512,entropy=1", "64x64x4200,temperature=0.7,cap=5,entropy=1"),
    cpu=("4096x256x32768", "4096x256x32768,entropy=1"),
    accelerator=("8192x4096x32768", "8192x4096x128256,entropy=1", "8192x8192x16032,entropy=1"),
)
