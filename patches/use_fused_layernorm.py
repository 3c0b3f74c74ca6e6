"""`--use-fused-layernorm`: LayerNorm as one operator.

Reaches `WrappedTorchNorm.__new__`, which makes every local LayerNorm without Apex. Parameters are named as in
`torch.nn.LayerNorm`, so checkpoints interchange. Leaves other norms, Apex and Transformer Engine alone. Falls back for
a memory-efficient norm, which Megatron refuses.
"""

from __future__ import annotations

import importlib.util

import torch

from mindspeed_lite.engine import Context, Feature
from mindspeed_lite.ops.layer_norm import layer_norm

from ._shared.conditions import every
from ._shared.local_norms import MEMORY_EFFICIENT, FusedNorm, local_norm, norm_patch


class FusedLayerNorm(FusedNorm, torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` computed by `mindspeed_lite.ops.layer_norm`."""

    kind = "LayerNorm"
    operator_name = "layer_norm"
    parameter_names = ("weight", "bias")
    operator = staticmethod(layer_norm)


def _why_not(context: Context) -> list[str]:
    if importlib.util.find_spec("apex") is None:
        return []
    return ["Apex is installed, whose fused norm Megatron's local implementation takes for LayerNorm"]


FEATURE = Feature(
    name="use_fused_layernorm",
    summary="LayerNorm as one operator; also under sequence parallelism and with zero-centred gamma",
    numerics="ulp",
    theme="operators",
    condition=every(local_norm("LayerNorm"), _why_not),
    conflicting_args=MEMORY_EFFICIENT,
    operators=("layer_norm",),
    patches=(norm_patch(FusedLayerNorm),),
)
