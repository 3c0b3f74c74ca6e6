"""`--reuse-fp32-param`: store fp32 main parameters as bf16 weights plus 16 low bits.

The bf16 weight is the rounded upper half of the fp32 value, so the optimizer keeps only the lower 16 bits. The fused
AdamW (`--use-fused-adamw`, turned on) joins both in registers, updates and splits again. The bit that undoes the
rounding is the sign of the second moment.

Reaches the mixed-precision optimizers after they have made main parameters (`__init__`), and every method that reads or
writes these outside the step, checkpoints included (`_shared.optimizer_state`). Main parameters are placeholders that
read as NaN elsewhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mindspeed_lite.engine import Around, Context, Feature, Option, Override, Relation, Session
from mindspeed_lite.optim.fused_adam import FusedAdam, FusedAdamW
from mindspeed_lite.optim.split_params import SplitFP32Params

from . import use_fused_adamw
from ._shared.optimizer_state import (
    DISTRIBUTED,
    FLOAT16,
    PATCHES,
    copy_main,
    main_params_are_used,
    patch_optimizer_init,
    with_materialized_state,
)


def _split_params_of(optimizer: Any) -> SplitFP32Params | None:
    return getattr(getattr(optimizer, "optimizer", None), "split_params", None)


def _use(optimizer: Any, inner: FusedAdam | FusedAdamW, session: Session) -> None:
    owner = weakref.ref(optimizer)

    def highs() -> Mapping[torch.Tensor, torch.Tensor]:
        return {
            main: high
            for main, high in use_fused_adamw.cast_targets(owner()).items()
            if main.dtype == torch.float32 and high.dtype == torch.bfloat16 and high.is_contiguous()
        }

    inner.split_params = SplitFP32Params(inner, highs)
    for name in ("fp32_from_float16_groups", "shard_fp32_from_float16_groups"):
        mains = [main for group in getattr(optimizer, name, ()) for main in group if main is not None]
        alone = len(mains) - len(inner.split_params.halves()) if mains else 0
        if alone:
            session.fallback(FEATURE.name, f"{alone} main parameters have no bf16 weight to be half of")


_init = patch_optimizer_init("reuse_fp32_param", _use)


def _dummy_step(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """The step that makes states for a checkpoint leaves the weights alone, which are the model's."""

    def _init_optimizer_states_with_dummy_values(self: Any) -> Any:
        if _split_params_of(self) is None:
            return wrapped(self)
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        try:
            for group in groups:
                group["lr"] = 0.0
            return wrapped(self)
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    return _init_optimizer_states_with_dummy_values


def _why_not(context: Context) -> Sequence[str]:
    reasons = []
    if context.host_args is not None and not context.arg("bf16", False):
        reasons.append("--bf16 is not given: only a bf16 weight is half of an fp32 number")
    return reasons + main_params_are_used(context)


FEATURE = Feature(
    name="reuse_fp32_param",
    summary="bf16 weights and fp32 main parameters in one storage of 4 bytes",
    options=(
        Option("--reuse-fp32-param", help="Keep no fp32 copy of the weights: 16 bits beside the bf16 ones hold it."),
    ),
    numerics="bitwise",
    theme="memory",
    condition=_why_not,
    requires=(Relation("use_fused_adamw", "its step alone updates weights in halves"),),
    operators=("adamw",),
    patches=(
        Around(f"{FLOAT16}.__init__", _init, reads=("optimizer", *use_fused_adamw.FLOAT16_READS)),
        Around(f"{FLOAT16}._copy_model_params_to_main_params", with_materialized_state),
        Override(f"{FLOAT16}._copy_main_params_to_model_params", copy_main),
        Around(f"{DISTRIBUTED}.__init__", _init, reads=("optimizer", *use_fused_adamw.DISTRIBUTED_READS)),
        Around(
            f"{DISTRIBUTED}._init_optimizer_states_with_dummy_values",
            _dummy_step,
            absent_in="<0.14",
            reads=("optimizer",),
        ),
        Around(f"{DISTRIBUTED}._copy_model_params_to_main_params", with_materialized_state),
        Override(f"{DISTRIBUTED}._copy_main_params_to_model_params", copy_main),
        *PATCHES,
    ),
)
