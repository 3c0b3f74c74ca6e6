"""`--swap-optimizer`: offload main parameters and Adam's moments between steps.

The fused AdamW (`--use-fused-adamw`, turned on) updates one group while pinned-memory copies of its neighbours run.
Model weights and split parameters (`--reuse-fp32-param`) stay. Reaches Megatron's optimizers after `__init__`, and
every method that accesses main parameters outside the step (`_shared.optimizer_state`). Elsewhere they are placeholders
that read as NaN. Leaves gradients, clipping and skipped steps alone.
"""

from __future__ import annotations

from typing import Any

from mindspeed_lite.engine import Feature, Option, Relation, Session
from mindspeed_lite.memory.copy_engine import CopyEngine
from mindspeed_lite.memory.swapped_optimizer_state import SwappedOptimizerState
from mindspeed_lite.optim.fused_adam import FusedStep

from . import use_fused_adamw
from ._shared.optimizer_state import MAIN_PARAM_ARGS, state_patches


def _no_copy_engine(device: str) -> list[str]:
    if device == "cpu":
        return ["cpu has one memory: --virtual-optimizer keeps the moments in files there"]
    return []


def _use(optimizer: Any, inner: FusedStep, session: Session) -> None:
    parameters = [each for group in inner.param_groups for each in group["params"]]
    if not parameters:
        return

    def make() -> SwappedOptimizerState:
        times = session.settings.swap_optimizer_times
        return SwappedOptimizerState(CopyEngine(parameters[0].device), times, session.fallback_of(FEATURE.name))

    placement = session.state(FEATURE.name, make)
    inner.placement = placement
    placement.register(use_fused_adamw.cast_targets(optimizer))


FEATURE = Feature(
    name="swap_optimizer",
    summary="main parameters and Adam's moments in host memory, on the device in groups during the step",
    options=(
        Option("--swap-optimizer"),
        Option.count(
            "--swap-optimizer-times",
            "Number of groups per optimizer step; three are resident at once, so more groups use less memory.",
            16,
        ),
    ),
    numerics="bitwise",
    theme="memory",
    condition=lambda context: _no_copy_engine(context.device),
    conflicting_args=MAIN_PARAM_ARGS,
    not_auto="it trades speed for memory: enable it explicitly with its flag",
    requires=(Relation("use_fused_adamw", "its step alone goes over parameters in groups"),),
    conflicts=(Relation("virtual_optimizer", "both keep Adam's moments in host memory, each in its own way"),),
    operators=("adamw",),
    patches=state_patches("swap_optimizer", _use, reads=use_fused_adamw.CAST_TARGET_READS, moves_main_params=True),
)
