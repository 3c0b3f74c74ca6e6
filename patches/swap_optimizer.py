"""`--swap-optimizer`: fp32 main parameters and Adam's moments in host memory, on the device for their part of a step.

Twelve bytes a parameter are needed once a step, and a part of them at a time. They stand in pinned memory of the host;
the fused AdamW (`--use-fused-adamw`, which this flag turns on) goes over groups of consecutive parameters, and while
one is updated on the device, the next comes in and the one before goes out. Parameters that are the model's own
weights, and those in halves (`--reuse-fp32-param`), stay: of them the moments alone move.

Reaches Megatron's optimizers where they have made their main parameters (`__init__`), and every method that reads or
writes these or the moments beside the step, those of checkpoints among them (`_optimizer_forms`). The objects in
between keep shape and dtype and read as NaN. Leaves gradients alone, and with them norms, clipping and skipped steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from mindspeed_lite.engine import Context, Feature, Option, OptionError, Relation, Session, Wrap
from mindspeed_lite.memory.link import Link, Streams
from mindspeed_lite.memory.streamed import Streamed
from mindspeed_lite.ops.adamw.optimizer import FusedAdam, FusedAdamW

from . import use_fused_adamw
from ._optimizer_forms import (
    DISTRIBUTED,
    FLOAT16,
    FP32,
    FP32_PATCHES,
    PATCHES,
    after_init,
    around_whole,
    copy_main,
    main_params_are_used,
)

_of_session: weakref.WeakKeyDictionary[Session, Streamed] = weakref.WeakKeyDictionary()


def _link_of(device: torch.device) -> Link:
    return Streams(device)


def _no_link(device: str) -> list[str]:
    """Reasons why there is no second memory; empty if there is."""
    if device == "cpu":
        return ["cpu has one memory: --virtual-optimizer keeps the moments in files there"]
    return []


def _use(optimizer: Any, inner: FusedAdam | FusedAdamW, session: Session) -> None:
    parameters = [each for group in inner.param_groups for each in group["params"]]
    if not parameters:
        return
    home = _of_session.get(session)
    if home is None:
        # One for all optimizers, which make their steps one after the other.
        times = session.settings.swap_optimizer_times
        home = Streamed(_link_of(parameters[0].device), times, session.fallback_of(FEATURE.name))
        _of_session[session] = home
    inner.home = home
    # What is copied into weights is not the weights.
    home.adopt(use_fused_adamw.copies(optimizer))


_init = after_init("swap_optimizer", _use)


def _why_not(context: Context) -> Sequence[str]:
    settings = context.settings
    times = settings.get("swap_optimizer_times", 1)
    if not isinstance(times, int) or times < 1:
        raise OptionError(
            f"--swap-optimizer-times {times}: `swap_optimizer` takes a number of groups from 1 on; MindSpeed's 0, all "
            "in one order of its own, does not exist here"
        )
    reasons = _no_link(context.device) + main_params_are_used(context)
    if settings.get("mindspeed_lite_auto") and not settings.get("swap_optimizer"):
        reasons.append("it trades time for memory: ask for it by name")
    return reasons


FEATURE = Feature(
    name="swap_optimizer",
    summary="Main parameters and Adam's moments in host memory, on the device in groups during the step",
    options=(
        Option(
            "--swap-optimizer",
            help="Keep fp32 main parameters and Adam's moments in host memory; bring them to the device for the step.",
        ),
        Option(
            "--swap-optimizer-times",
            default=16,
            type=int,
            metavar="N",
            help="Groups in which they come for a step, three at a time; more take less memory of the device.",
        ),
    ),
    numerics="bitwise",
    condition=_why_not,
    requires=(Relation("use_fused_adamw", "its step alone goes over parameters in groups"),),
    conflicts=(Relation("virtual_optimizer", "both keep Adam's moments in host memory, each in its own way"),),
    operators=("adamw",),
    patches=(
        Wrap(f"{FP32}.__init__", _init),
        Wrap(f"{FLOAT16}.__init__", _init),
        Wrap(f"{FLOAT16}._copy_model_params_to_main_params", around_whole),
        Wrap(f"{FLOAT16}._copy_main_params_to_model_params", copy_main),
        Wrap(f"{DISTRIBUTED}.__init__", _init),
        Wrap(f"{DISTRIBUTED}._copy_model_params_to_main_params", around_whole),
        Wrap(f"{DISTRIBUTED}._copy_main_params_to_model_params", copy_main),
        *PATCHES,
        *FP32_PATCHES,
    ),
)
