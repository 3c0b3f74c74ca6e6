"""`--reuse-fp32-param`: store fp32 main parameters as bf16 weights plus 16 low bits.

The fused AdamW (`--use-fused-adamw`, turned on) joins and splits them; the second moment's sign holds the bit that
undoes rounding. Reaches mixed-precision optimizers after `__init__`, and every method that accesses main parameters
outside the step (`_shared.optimizer_state`). Elsewhere they are placeholders that read as NaN.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from mindspeed_lite.engine import Around, Feature, Relation, Session
from mindspeed_lite.optim.fused_adam import FusedStep
from mindspeed_lite.optim.split_params import SplitFP32Params

from . import use_fused_adamw
from ._shared.conditions import needs
from ._shared.optimizer_state import DISTRIBUTED, MAIN_PARAM_ARGS, state_patches
from ._shared.wrappers import within


def _split_params_of(optimizer: Any) -> SplitFP32Params | None:
    return getattr(getattr(optimizer, "optimizer", None), "split_params", None)


def _use(optimizer: Any, inner: FusedStep, session: Session) -> None:
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


@contextlib.contextmanager
def _without_update(session: Session, optimizer: Any) -> Iterator[None]:
    """Leave weights unchanged in the step that only creates states for a checkpoint."""
    groups = optimizer.optimizer.param_groups if _split_params_of(optimizer) is not None else []
    rates = [group["lr"] for group in groups]
    try:
        for group in groups:
            group["lr"] = 0.0
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


FEATURE = Feature(
    name="reuse_fp32_param",
    summary="bf16 weights and fp32 main parameters in one storage of 4 bytes",
    numerics="bitwise",
    theme="memory",
    condition=needs("bf16", "only a bf16 weight is half of an fp32 number"),
    conflicting_args=MAIN_PARAM_ARGS,
    requires=(Relation("use_fused_adamw", "its step alone updates weights in halves"),),
    operators=("adamw",),
    patches=(
        Around(
            f"{DISTRIBUTED}._init_optimizer_states_with_dummy_values",
            within(_without_update),
            versions=">=0.14",
            reads=("optimizer",),
        ),
        *state_patches(
            "reuse_fp32_param", _use, reads=use_fused_adamw.CAST_TARGET_READS, has_fp32=False, moves_main_params=True
        ),
    ),
)
