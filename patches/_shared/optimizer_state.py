"""Converts checkpoints of optimizers whose state is split, quantized or in host memory between steps.

fp32 copies go into a checkpoint, what comes out of one is converted on arrival, and a method of Megatron's that reads
or writes values in place runs inside `materialized()`. So checkpoints are the same with and without the features.
Every feature that stores optimizer state in a form of its own lists these patches; applied twice they do the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from mindspeed_lite.engine import Around, Context, Session
from mindspeed_lite.optim.fused_adam import FusedAdam, FusedAdamW


def optimizer_with_custom_state(optimizer: Any) -> FusedAdam | FusedAdamW | None:
    """The inner optimizer of one of Megatron's, if it has numbers in other forms, or elsewhere."""
    inner = getattr(optimizer, "optimizer", None)
    if not isinstance(inner, (FusedAdam, FusedAdamW)):
        return None
    elsewhere = inner.placement is not None and not inner.placement.device_addressable
    return inner if elsewhere or inner.split_params is not None or inner.quantized_moments is not None else None


def main_params_are_used(context: Context) -> list[str]:
    """Flags with which Megatron reads or writes main parameters in more places than the patches here reach."""
    return [
        what
        for name, what in (
            ("fp8_param_gather", "--fp8-param-gather keeps weights in fp8"),
            ("fp4_param_gather", "--fp4-param-gather keeps weights in fp4"),
            ("reuse_grad_buf_for_mxfp8_param_ag", "--reuse-grad-buf-for-mxfp8-param-ag copies main parameters itself"),
            ("qk_clip", "--qk-clip changes main parameters inside attention"),
            ("log_params_norm", "--log-params-norm reads the fp32 main parameters"),
            ("rl_offload_optimizer_during_inference", "--rl-offload-optimizer-during-inference moves main parameters"),
        )
        if context.arg(name, None)
    ]


def with_materialized_state(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """Runs Megatron's method with fp32 state on the device."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        inner = optimizer_with_custom_state(self)
        if inner is None:
            return wrapped(self, *args, **kwargs)
        with inner.materialized():
            return wrapped(self, *args, **kwargs)

    return method


def copy_main(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """The copy into the model's weights, of parameters that are plain, where the step has not written them."""
    materialized = with_materialized_state(wrapped, session)

    def _copy_main_params_to_model_params(self: Any) -> Any:
        inner = optimizer_with_custom_state(self)
        if inner is not None and inner.step_data.casts_done:
            return None
        return materialized(self)

    return _copy_main_params_to_model_params


def _state_dict(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """What is saved holds its tensors on, beyond this call: so copies go into it."""

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        found, inner = wrapped(self, *args, **kwargs), optimizer_with_custom_state(self)
        if inner is None:
            return found
        # torch numbers the parameters in the order of the groups.
        mains = [main for group in inner.param_groups for main in group["params"]]
        plain = {main: inner.fp32_copy(main) for main in mains}
        groups = getattr(self, "fp32_from_float16_groups", None)
        if groups is not None:
            found["fp32_from_fp16_params"] = [[plain[main].get("param", main) for main in group] for group in groups]
        state = (found if groups is None else found["optimizer"])["state"]
        for number, main in enumerate(mains):
            if number in state:
                moments = {name: each for name, each in plain[main].items() if name in state[number]}
                state[number] = {**state[number], **moments}
                if "exp_avg_sq" in moments:
                    state[number]["exp_avg_sq"] = moments["exp_avg_sq"].abs()
        return found

    return state_dict


def _get(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def _get_main_param_and_optimizer_states(self: Any, model_param: Any) -> Any:
        found, inner = wrapped(self, model_param), optimizer_with_custom_state(self)
        return found if inner is None else {**found, **inner.fp32_copy(found["param"])}

    return _get_main_param_and_optimizer_states


def _set(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def _set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: Any) -> Any:
        inner = optimizer_with_custom_state(self)
        if inner is None:
            return wrapped(self, model_param, tensors)
        group, place = self.model_param_group_index_map[model_param]
        with inner.materialized([inner.param_groups[group]["params"][place]]):
            return wrapped(self, model_param, tensors)

    return _set_main_param_and_optimizer_states


def patch_optimizer_init(
    feature: str, use: Callable[[Any, FusedAdam | FusedAdamW, Session], None]
) -> Callable[..., Any]:
    """For a wrap of an optimizer's `__init__`: what `use(optimizer, inner, session)` does where there is a fused step.

    An inner optimizer without it is left alone; the reason is logged. When the features end, the inner one's state is
    restored to fp32 on the device: what is trained on then is an ordinary optimizer.
    """

    def around(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            wrapped(self, *args, **kwargs)
            inner = self.optimizer
            if inner is None or getattr(self, "is_stub_optimizer", False):
                return
            if not isinstance(inner, (FusedAdam, FusedAdamW)):
                session.fallback(feature, f"the optimizer is {type(inner).__qualname__}, without the fused step")
                return
            use(self, inner, session)
            end_with(session, inner)

        return __init__

    return around


def end_with(session: Session, optimizer: FusedAdam | FusedAdamW) -> None:
    """Make its numbers plain when the features end."""
    owner = weakref.ref(optimizer)

    def end() -> None:
        found = owner()
        if isinstance(found, (FusedAdam, FusedAdamW)):
            found.restore()

    session.on_end(end)


OPTIMIZERS = "megatron.core.optimizer"
FP32 = f"{OPTIMIZERS}.optimizer:FP32Optimizer"
FLOAT16 = f"{OPTIMIZERS}.optimizer:Float16OptimizerWithFloat16Params"
DISTRIBUTED = f"{OPTIMIZERS}.distrib_optimizer:DistributedOptimizer"

PATCHES = (
    Around(f"{FLOAT16}.state_dict", _state_dict),
    Around(f"{FLOAT16}.load_state_dict", with_materialized_state),
    Around(f"{DISTRIBUTED}._get_main_param_and_optimizer_states", _get),
    Around(f"{DISTRIBUTED}._set_main_param_and_optimizer_states", _set, reads=("model_param_group_index_map",)),
    Around(f"{DISTRIBUTED}.load_parameter_state_from_dp_zero_legacy", with_materialized_state),
)
# Of an optimizer whose parameters are the model's own.
FP32_PATCHES = (
    Around(f"{FP32}.state_dict", _state_dict),
    Around(f"{FP32}.load_state_dict", with_materialized_state),
)
