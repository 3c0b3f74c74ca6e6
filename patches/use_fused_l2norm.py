"""`--use-fused-l2norm`: the L2 norm of queries and keys as one operator.

Reaches `L2Norm.forward`, which every layer specification uses for `--qk-l2-norm`. Megatron makes four passes and keeps
fp32 copies; this is RMSNorm with unit weight. Leaves other norms alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mindspeed_lite.engine import Context, Feature, Function, Option, Override, Session
from mindspeed_lite.ops.rms_norm import rms_norm

_NORM = "megatron.core.transformer.torch_norm:L2Norm"


def _forward(wrapped: Function, session: Session) -> Function:
    def forward(self: Any, x: Any) -> Any:
        ones = session.state(FEATURE.name, dict)
        key = (x.size(-1), x.dtype, x.device)
        if key not in ones:
            ones[key] = torch.ones(x.size(-1), dtype=x.dtype, device=x.device)
        weight, eps = ones[key], self.eps
        if session.verifier is not None:
            session.verifier.check(
                FEATURE.name,
                "rms_norm",
                FEATURE.numerics,
                lambda x: rms_norm(x, weight, eps),
                lambda x: wrapped(self, x),
                {"x": x},
                against="Megatron's L2Norm",
            )
        return rms_norm(x, weight, eps)

    return forward


def _why_not(context: Context) -> Sequence[str]:
    if context.host_args is not None and not context.arg("qk_l2_norm", False):
        return ["--qk-l2-norm is not given: the model has no L2 norm"]
    return []


FEATURE = Feature(
    name="use_fused_l2norm",
    summary="the L2 norm of queries and keys as one operator",
    options=(Option("--use-fused-l2norm", help="Compute the L2 norm of queries and keys with one fused operator."),),
    numerics="ulp",
    theme="operators",
    memory="not predicted: saves two fp32 copies of queries and keys",
    condition=_why_not,
    operators=("rms_norm",),
    patches=(Override(f"{_NORM}.forward", _forward, reads=("eps",), relies_on=(f"{_NORM}._norm",)),),
)
