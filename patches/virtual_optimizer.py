"""`--virtual-optimizer`: Adam's moments in host memory that the device addresses.

The fused AdamW (`--use-fused-adamw`, turned on) reads and writes them in place. A budget per pipeline stage limits
their bytes, first parameters first. Reaches Megatron's optimizers after `__init__`. State keys, shapes and dtypes are
unchanged, so checkpoints are Megatron's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_lite.engine import Context, Feature, Option, OptionError, Relation, Session
from mindspeed_lite.memory import host
from mindspeed_lite.memory.host_mapped_moments import HostMappedMoments
from mindspeed_lite.optim.fused_adam import FusedStep

from ._shared.optimizer_state import MOMENT_ARGS, state_patches

_ALL = "all"


def _amount(text: str) -> str | float:
    if text == _ALL:
        return _ALL
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ValueError("all, or a number of GiB from 0 on")
    return number


def _budget(given: Sequence[str | float], stage: int, stages: int) -> int | None:
    if len(given) not in (1, stages):
        raise OptionError(
            f"--virtual-optimizer: `virtual_optimizer` takes one budget or one for each of {stages} pipeline stages, "
            f"not {len(given)}: give {stages}, or one for all"
        )
    amount = given[stage if len(given) > 1 else 0]
    if amount != _ALL and not 0 <= float(amount) < float("inf"):
        raise OptionError(f"--virtual-optimizer {amount}: `virtual_optimizer` takes GiB from 0 on, or `{_ALL}`")
    return None if amount == _ALL else int(float(amount) * 2**30)


def _shared(session: Session) -> HostMappedMoments:
    def make() -> HostMappedMoments:
        from megatron.core import parallel_state

        stage, stages = 0, 1
        if parallel_state.model_parallel_is_initialized():
            stage = parallel_state.get_pipeline_model_parallel_rank()
            stages = parallel_state.get_pipeline_model_parallel_world_size()
        budget = _budget(session.settings.virtual_optimizer, stage, stages)
        return HostMappedMoments(budget, session.fallback_of(FEATURE.name))

    placement: HostMappedMoments = session.state(FEATURE.name, make)
    return placement


def _use(optimizer: Any, inner: FusedStep, session: Session) -> None:
    inner.placement = _shared(session)


def _why_not(context: Context) -> list[str]:
    given = context.settings.get("virtual_optimizer")
    if given:
        # Reports a mistake before anything is built.
        _budget(given, 0, context.arg("pipeline_model_parallel_size", None) or len(given))
    return host.why_not(context.device)


FEATURE = Feature(
    name="virtual_optimizer",
    summary="Adam's moments in host memory that the device addresses",
    options=(
        Option(
            "--virtual-optimizer",
            default=None,
            type=_amount,
            nargs="+",
            on=(_ALL,),
            metavar="GIB",
            help="Keep this much of Adam's moments in host memory, a number for each pipeline stage or one; or `all`.",
        ),
    ),
    numerics="bitwise",
    theme="memory",
    condition=_why_not,
    conflicting_args=MOMENT_ARGS,
    requires=(Relation("use_fused_adamw", "its step alone goes over moments where they are"),),
    operators=("adamw",),
    patches=state_patches("virtual_optimizer", _use, is_in_checkpoints=False),
)
