"""`--use-ascend-mc2`: fused collective and GEMM operators of an NPU.

Reaches sequence parallel local `ColumnParallelLinear` and `RowParallelLinear` through `_shared.linear_layers`, forward
and input gradient. Leaves other layers and experts alone. Falls back for unsupported shapes.
"""

from __future__ import annotations

from mindspeed_lite.engine import Context, Feature, Relation
from mindspeed_lite.parallel.mc2 import MC2
from mindspeed_lite.parallel.tp_linear import TPCommConfig, fixed_chunks

from ._shared import linear_layers
from ._shared.conditions import every, local, needs
from ._shared.linear_layers import LayerCall

NAME = "use_ascend_mc2"
_INSTEAD = "--use-ascend-coc"


def _comm_config(call: LayerCall) -> TPCommConfig:
    if not call.sequence_parallel:
        call.session.fallback(NAME, "a layer is not sequence parallel: nothing is gathered or scattered")
    fused = MC2(call.session.fallback_of(NAME))
    return TPCommConfig(call.group, call.sequence_parallel, fixed_chunks(1), call.wgrad, fused)


def _why_not(context: Context) -> list[str]:
    is_npu = context.device == "npu"
    return [] if is_npu else [f"the operators are CANN's, for an NPU, and the device is {context.device}: {_INSTEAD}"]


FEATURE = Feature(
    name=NAME,
    summary="gather with product and product with scatter in one operator of an NPU",
    numerics="ulp",
    theme="communication",
    memory="not predicted: never measured on a device",
    unsupported=linear_layers.UNSUPPORTED,
    condition=every(
        _why_not,
        local("has its own layers"),
        linear_layers.has_group,
        needs("sequence_parallel", "nothing is gathered or scattered"),
    ),
    conflicting_args=linear_layers.CONFLICTING_ARGS,
    not_auto="it has never been timed on a device: enable it explicitly with its flag",
    conflicts=(Relation("use_ascend_coc", "both say how a layer's communication is hidden"),),
    patches=linear_layers.tp_linear_patches(NAME, _comm_config),
)
