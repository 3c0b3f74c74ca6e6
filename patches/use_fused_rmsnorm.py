"""`--use-fused-rmsnorm`: RMSNorm as one operator.

Reaches `WrappedTorchNorm.__new__`, which makes every local RMSNorm. Parameters are named as in `torch.nn.RMSNorm`, so
checkpoints interchange. Leaves other norms and Transformer Engine alone. Falls back for a memory-efficient norm, which
Megatron refuses.
"""

from __future__ import annotations

import torch

from mindspeed_lite.engine import Feature
from mindspeed_lite.ops.rms_norm import rms_norm

from ._shared.local_norms import MEMORY_EFFICIENT, FusedNorm, local_norm, norm_patch


class FusedRMSNorm(FusedNorm, torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` computed by `mindspeed_lite.ops.rms_norm`."""

    kind = "RMSNorm"
    operator_name = "rms_norm"
    operator = staticmethod(rms_norm)


FEATURE = Feature(
    name="use_fused_rmsnorm",
    summary="RMSNorm as one fused operator; also under sequence parallelism",
    numerics="ulp",
    theme="operators",
    condition=local_norm("RMSNorm"),
    conflicting_args=MEMORY_EFFICIENT,
    operators=("rms_norm",),
    patches=(norm_patch(FusedRMSNorm),),
)
