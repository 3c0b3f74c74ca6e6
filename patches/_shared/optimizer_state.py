"""Checkpoints and access for optimizer state that is split, quantized or in host memory.

Checkpoints hold fp32 copies, as without the features.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from mindspeed_lite.engine import Around, Function, Session
from mindspeed_lite.optim.fused_adam import FusedStep

from .wrappers import within

# Flags with which Megatron uses main parameters where these patches do not reach.
MAIN_PARAM_ARGS = {
    "fp8_param_gather": "--fp8-param-gather keeps weights in fp8",
    "fp4_param_gather": "--fp4-param-gather keeps weights in fp4",
    "reuse_grad_buf_for_mxfp8_param_ag": "--reuse-grad-buf-for-mxfp8-param-ag copies main parameters itself",
    "qk_clip": "--qk-clip changes main parameters inside attention",
    "log_params_norm": "--log-params-norm reads the fp32 main parameters",
    "rl_offload_optimizer_during_inference": "--rl-offload-optimizer-during-inference moves main parameters",
}
MOMENT_ARGS = {
    "rl_offload_optimizer_during_inference": "--rl-offload-optimizer-during-inference moves the moments itself"
}


def has_fused_step(optimizer: Any) -> bool:
    return isinstance(optimizer, FusedStep)


def optimizer_with_custom_state(optimizer: Any) -> FusedStep | None:
    inner: Any = getattr(optimizer, "optimizer", None)
    if not has_fused_step(inner):
        return None
    elsewhere = inner.placement is not None and not inner.placement.device_addressable
    return inner if elsewhere or inner.split_params is not None or inner.quantized_moments is not None else None


def _materialized(session: Session, optimizer: Any) -> contextlib.AbstractContextManager[Any]:
    inner = optimizer_with_custom_state(optimizer)
    return contextlib.nullcontext() if inner is None else inner.materialized()


with_materialized_state = within(_materialized)


def copy_main(wrapped: Function, session: Session) -> Function:
    def _copy_main_params_to_model_params(self: Any) -> Any:
        if has_fused_step(self.optimizer) and self.optimizer.step_data.casts_done:
            return None
        with _materialized(session, self):
            return wrapped(self)

    return _copy_main_params_to_model_params


def _state_dict(wrapped: Function, session: Session) -> Function:
    """Save fp32 copies; the saved dict outlives the call."""

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        found, inner = wrapped(self, *args, **kwargs), optimizer_with_custom_state(self)
        if inner is None:
            return found
        # torch's state dict numbers parameters in group order.
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


def _get(wrapped: Function, session: Session) -> Function:
    def _get_main_param_and_optimizer_states(self: Any, model_param: Any) -> Any:
        found, inner = wrapped(self, model_param), optimizer_with_custom_state(self)
        return found if inner is None else {**found, **inner.fp32_copy(found["param"])}

    return _get_main_param_and_optimizer_states


def _set(wrapped: Function, session: Session) -> Function:
    def _set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: Any) -> Any:
        inner = optimizer_with_custom_state(self)
        if inner is None:
            return wrapped(self, model_param, tensors)
        group, place = self.model_param_group_index_map[model_param]
        with inner.materialized([inner.param_groups[group]["params"][place]]):
            return wrapped(self, model_param, tensors)

    return _set_main_param_and_optimizer_states


def state_patches(
    feature: str,
    use: Callable[[Any, Any, Session], None],
    *,
    reads: Mapping[str, Sequence[str]] | None = None,
    has_fp32: bool = True,
    moves_main_params: bool = False,
    is_in_checkpoints: bool = True,
) -> tuple[Around, ...]:
    """Call `use(optimizer, inner, session)` after `__init__` if the inner optimizer has the fused step.

    When such a feature begins or ends, all optimizers get the forms of those that are on.

    Args:
        reads: attributes that `use` reads, by optimizer class.
        has_fp32: also for models in fp32.
        moves_main_params: main parameters are readable only in a step and where these patches materialize them.
        is_in_checkpoints: checkpoints need fp32 copies.
    """

    def adopt(session: Session, optimizer: Any) -> None:
        inner = optimizer.optimizer
        if inner is None or getattr(optimizer, "is_stub_optimizer", False):
            return
        if not has_fused_step(inner):
            session.fallback(feature, f"the optimizer is {type(inner).__qualname__}, without the fused step")
            return
        use(optimizer, inner, session)
        _known.add(optimizer)

    def init(wrapped: Function, session: Session) -> Function:
        uses: list[Callable[[Any, Any], None]] = session.state(_USES[feature], list)
        if not uses:

            def end() -> None:
                uses.clear()
                _rearrange(session)

            uses.append(lambda optimizer, inner: use(optimizer, inner, session))
            session.on_begin(lambda: _rearrange(session))
            session.on_end(end)

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            wrapped(self, *args, **kwargs)
            adopt(session, self)

        return __init__

    kinds = ((FP32,) if has_fp32 else ()) + (FLOAT16, DISTRIBUTED)
    methods = [f"{each}._copy_model_params_to_main_params" for each in (FLOAT16, DISTRIBUTED) if moves_main_params]
    found = [
        *(Around(f"{each}.__init__", init, reads=("optimizer", *(reads or {}).get(each, ()))) for each in kinds),
        *(Around(each, with_materialized_state) for each in methods),
    ]
    return (*found, *_checkpoint_patches(has_fp32)) if is_in_checkpoints else (*found,)


# Key of each feature's `use` in its session. Moments are quantized after the split has put a bit into their sign, and
# placed in their last form.
_USES = {
    name: f"{name} of optimizers"
    for name in ("reuse_fp32_param", "quant_states", "swap_optimizer", "virtual_optimizer")
}
#: Megatron's optimizers that have had such a state.
_known: weakref.WeakSet[Any] = weakref.WeakSet()


def _rearrange(session: Session) -> None:
    """Give state the forms of the features that are on."""
    pairs = [(each, each.optimizer) for each in [*_known] if has_fused_step(each.optimizer)]
    for _, inner in pairs:
        inner.restore()
    # One that fails does not leave the others in fp32.
    with contextlib.ExitStack() as stack:
        for optimizer, inner in reversed(pairs):
            stack.callback(_arrange, session, optimizer, inner)


def _arrange(session: Session, optimizer: Any, inner: FusedStep) -> None:
    for key in _USES.values():
        for use in session.find(key) or ():
            use(optimizer, inner)
    inner.pack()


# Model parameter -> (inner optimizer, tensor that it updates).
MainParams = Mapping[Tensor, tuple[Any, Tensor]]
# Attribute that identifies a Megatron optimizer -> (model parameters, main parameters).
_GROUPS = (
    ("fp32_from_float16_groups", (("float16_groups", "fp32_from_float16_groups"), ("fp32_from_fp32_groups",) * 2)),
    (
        "shard_fp32_from_float16_groups",
        (("model_float16_groups", "shard_fp32_from_float16_groups"), ("model_fp32_groups", "shard_fp32_groups")),
    ),
)


def leaves(optimizer: Any) -> list[Any]:
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        return [leaf for each in chained for leaf in leaves(each)]
    return [] if optimizer.optimizer is None or getattr(optimizer, "is_stub_optimizer", False) else [optimizer]


def main_params(optimizers: Sequence[Any]) -> dict[Tensor, tuple[Any, Tensor]]:
    """Parameter -> what its optimizer updates: an fp32 copy, a shard, or itself."""
    found = {}
    for each in optimizers:
        tables = next((tables for name, tables in _GROUPS if hasattr(each, name)), None)
        if tables is None:
            pairs = [(main, main) for group in each.optimizer.param_groups for main in group["params"]]
        else:
            groups = [pair for names in tables for pair in zip(*(getattr(each, name) for name in names), strict=True)]
            pairs = [pair for models, mains in groups for pair in zip(models, mains, strict=True)]
        found.update({model: (each.optimizer, main) for model, main in pairs if main is not None})
    return found


@contextlib.contextmanager
def training_state(parameters: Sequence[Tensor], mains: MainParams) -> Iterator[list[Tensor]]:
    """Context that yields parameters, main parameters and fp32 states; writes persist."""
    held = [(each, *mains[each]) for each in parameters if each in mains]
    with contextlib.ExitStack() as stack:
        for inner in {id(inner): inner for _, inner, _ in held}.values():
            if has_fused_step(inner):
                stack.enter_context(inner.materialized([main for _, its, main in held if its is inner]))
        found = list(parameters)
        for parameter, inner, main in held:
            # Main parameters may be views of the parameter.
            if main.untyped_storage()._cdata != parameter.untyped_storage()._cdata:
                found.append(main)
            state = inner.state.get(main, {})
            found += [
                state[name]
                for name in sorted(state)
                if isinstance(state[name], Tensor) and state[name].dim() and state[name].shape == main.shape
            ]
        yield found


def finish_gathers(optimizers: Sequence[Any]) -> None:
    """Wait for pending expert parameter gathers without starting the next one."""
    for model in {id(model): model for each in optimizers for model in getattr(each, "model_chunks", ())}.values():
        for group in model.expert_parallel_bucket_groups:
            if getattr(group, "param_gather_handle", None) is not None:
                group.finish_param_sync(skip_next_bucket_dispatch=True)


OPTIMIZERS = "megatron.core.optimizer"
FP32 = f"{OPTIMIZERS}.optimizer:FP32Optimizer"
FLOAT16 = f"{OPTIMIZERS}.optimizer:Float16OptimizerWithFloat16Params"
DISTRIBUTED = f"{OPTIMIZERS}.distrib_optimizer:DistributedOptimizer"


def _checkpoint_patches(has_fp32: bool) -> list[Around]:
    """Patches that several features list; they are idempotent."""
    loads = [f"{DISTRIBUTED}.load_parameter_state_from_dp_zero_legacy"]
    kinds = (FLOAT16, FP32) if has_fp32 else (FLOAT16,)
    return [
        *(Around(f"{each}.state_dict", _state_dict) for each in kinds),
        *(Around(each, with_materialized_state) for each in [*(f"{kind}.load_state_dict" for kind in kinds), *loads]),
        Around(f"{DISTRIBUTED}._get_main_param_and_optimizer_states", _get),
        Around(f"{DISTRIBUTED}._set_main_param_and_optimizer_states", _set, reads=("model_param_group_index_map",)),
    ]
