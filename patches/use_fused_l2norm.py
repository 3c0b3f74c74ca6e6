"""`--use-fused-l2norm`: the L2 norm of queries and keys as one operator.

Reaches `L2Norm.forward`, which every layer specification uses for `--qk-l2-norm`. Megatron makes four passes and keeps
fp32 copies; this is RMSNorm with unit weight. Leaves other norms alone.
"""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_lite.engine import Feature, Function, Override, Session
from mindspeed_lite.ops.rms_norm import rms_norm

from ._shared.conditions import needs
from ._shared.wrappers import verify

_NORM = "megatron.core.transformer.torch_norm:L2Norm"


def _forward(wrapped: Function, session: Session) -> Function:
    def forward(self: Any, x: Any) -> Any:
        ones = session.state(FEATURE.name, dict)
        key = (x.size(-1), x.dtype, x.device)
        if key not in ones:
            ones[key] = torch.ones(x.size(-1), dtype=x.dtype, device=x.device)
        weight, eps = ones[key], self.eps
        ours, theirs = (lambda x: rms_norm(x, weight, eps)), (lambda x: wrapped(self, x))
        verify(session, FEATURE, "rms_norm", ours, theirs, {"x": x}, "Megatron's L2Norm")
        return rms_norm(x, weight, eps)

    return forward


FEATURE = Feature(
    name="use_fused_l2norm",
    summary="the L2 norm of queries and keys as one operator",
    numerics="ulp",
    theme="operators",
    memory="not predicted: saves two fp32 copies of queries and keys",
    condition=needs("qk_l2_norm", "the model has no L2 norm"),
    operators=("rms_norm",),
    patches=(Override(f"{_NORM}.forward", _forward, reads=("eps",), relies_on=(f"{_NORM}._norm",)),),
)
