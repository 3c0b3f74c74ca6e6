"""`--reduce-host-syncs`: the host waits for the device at log intervals instead of several times a step.

Reaches `get_grad_norm_fp32` and `multi_tensor_scale_tensor_impl` (norm and clip coefficient stay on the device),
`validate_result` (a training's checks of losses and gradients are read together), `get_loss_scale` (a constant without
fp16), and the reductions of `train_step` for the log. `training_log` and `save_checkpoint` read the checks first.
Reruns, by which Megatron tells hardware faults from others, need an answer in each step; they are off. Leaves
norms other than 2, DTensors, and clipping by Transformer Engine's kernel to Megatron.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mindspeed_lite.engine import Around, Context, Feature, Function, Override, Provide, Session
from mindspeed_lite.optim.grad_norm import scale_into, total_norm

from ._shared.steps import current_step, is_last_step

NAME = "reduce_host_syncs"
_TRAINING = "megatron.training"
_CLIP = "megatron.core.optimizer.clip_grads"
_OPTIMIZER = "megatron.core.optimizer.optimizer"
# Results that wait to be read take memory.
_MOST_CHECKS = 4096


class _Check(NamedTuple):
    """Deferred validation of a result: a flag on the device, and the check to repeat."""

    is_refused: Tensor
    iteration: int
    repeat: Callable[[], None]


class _Checks:
    """Checks of results since they were last read; the last are read when the feature ends."""

    def __init__(self, session: Session) -> None:
        self.waiting: list[_Check] = []
        session.on_end(self.read)

    def read(self) -> None:
        """Let Megatron report the first refused result, as it does at once without this feature."""
        checks, self.waiting = self.waiting, []
        if not checks:
            return
        for check, is_refused in zip(checks, torch.stack([each.is_refused for each in checks]).tolist(), strict=True):
            if is_refused:
                check.repeat()


def _checks(session: Session) -> _Checks:
    return session.state(NAME, lambda: _Checks(session))


def _validate(wrapped: Function, session: Session) -> Function:
    checks = _checks(session)

    def validate_result(
        self: Any, result: Any, rejection_func: Any, message: str, comparison_func: Any = None, tolerance: float = 0.0,
        fatal: bool = True,
    ) -> None:  # fmt: skip
        def decided(is_refused: Any, iteration: int) -> None:
            now, self.current_iteration = self.current_iteration, iteration
            try:
                wrapped(self, result, lambda result: is_refused, message, comparison_func, tolerance, fatal)
            finally:
                self.current_iteration = now

        is_refused, iteration = rejection_func(result), self.current_iteration
        # No log follows an evaluation.
        is_training = self.mode.value == "disabled" and self.state.name == "INITIAL_RUN"
        if not is_training or not isinstance(is_refused, Tensor) or is_refused.numel() != 1:
            decided(is_refused, iteration)
            return
        result = result.detach()
        checks.waiting.append(_Check(is_refused.reshape(()), iteration, lambda: decided(True, iteration)))
        if len(checks.waiting) >= _MOST_CHECKS:
            checks.read()

    return validate_result


def _log(wrapped: Function, session: Session) -> Function:
    checks = _checks(session)

    def training_log(*args: Any, **kwargs: Any) -> Any:
        step, interval = current_step(session.context), session.context.arg("log_interval", None)
        if step is None or not interval or step % interval == 0 or is_last_step(session.context, step):
            checks.read()
        return wrapped(*args, **kwargs)

    return training_log


def _save(wrapped: Function, session: Session) -> Function:
    checks = _checks(session)

    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        checks.read()
        return wrapped(*args, **kwargs)

    return save_checkpoint


def _norm(wrapped: Function, session: Session) -> Function:
    def get_grad_norm_fp32(grads_for_norm: Any, norm_type: Any = 2, grad_stats_parallel_group: Any = None) -> Any:
        grads = [grads_for_norm] if isinstance(grads_for_norm, Tensor) else grads_for_norm
        if (
            float(norm_type) != 2.0
            or not grads
            or any(type(each) not in (Tensor, torch.nn.Parameter) for each in grads)
        ):
            return wrapped(grads_for_norm, norm_type, grad_stats_parallel_group)
        from megatron.core.optimizer.clip_grads import (
            l2_norm_impl,
            multi_tensor_applier,
            multi_tensor_scale_tensor_impl,
        )

        if multi_tensor_scale_tensor_impl is not multi_tensor_scale_tensor:
            # With Transformer Engine's Megatron itself leaves the norm on the device.
            return wrapped(grads_for_norm, norm_type, grad_stats_parallel_group)
        unused = torch.zeros(1, dtype=torch.int, device=grads[0].device)
        norm, _ = multi_tensor_applier(l2_norm_impl, unused, [grads], False)
        return total_norm(norm, grad_stats_parallel_group)

    return get_grad_norm_fp32


def multi_tensor_scale_tensor(chunk_size: int, noop_flag: Any, tensor_lists: Any, scale: Tensor) -> None:
    sources, targets = tensor_lists
    if sources:
        scale_into(targets, sources, scale.float().reshape(()))


class _LossScales:
    """Constant loss scales on the host, for the log; the loss is multiplied by those on the device."""

    def __init__(self) -> None:
        self.on_host: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()
        self.is_multiplying = False


def _loss_scales(session: Session) -> _LossScales:
    return session.state(f"{NAME} scales", _LossScales)


def _loss_scale(wrapped: Function, session: Session) -> Function:
    scales = _loss_scales(session)

    def get_loss_scale(self: Any) -> Any:
        scale = wrapped(self)
        if getattr(self, "grad_scaler", None) is not None or scales.is_multiplying:
            return scale
        if self not in scales.on_host:
            scales.on_host[self] = scale.cpu()
        return scales.on_host[self]

    return get_loss_scale


def _scale_loss(wrapped: Function, session: Session) -> Function:
    scales = _loss_scales(session)

    def scale_loss(self: Any, loss: Any) -> Any:
        scales.is_multiplying = True
        try:
            return wrapped(self, loss)
        finally:
            scales.is_multiplying = False

    return scale_loss


def _reduced(wrapped: Function, session: Session, stat: Any, *given: Any) -> Any:
    if stat is None:
        return wrapped(stat, *given)
    from megatron.core import parallel_state

    if isinstance(stat, Tensor):
        value = stat.detach().to(torch.float32, copy=True).reshape(())
    else:
        value = torch.full((), stat, dtype=torch.float32, device=session.context.device)
    group = given[0] if given else parallel_state.get_model_parallel_group()
    torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX, group=group)
    return value


def _reduce_max(wrapped: Function, session: Session) -> Function:
    def reduce_max_stat_across_model_parallel_group(stat: Any, group: Any = None) -> Any:
        return _reduced(wrapped, session, stat, *(() if group is None else (group,)))

    return reduce_max_stat_across_model_parallel_group


def _reduce_max_ungrouped(wrapped: Function, session: Session) -> Function:
    def reduce_max_stat_across_model_parallel_group(stat: Any) -> Any:
        return _reduced(wrapped, session, stat)

    return reduce_max_stat_across_model_parallel_group


def _all_true(wrapped: Function, session: Session) -> Function:
    def logical_and_across_model_parallel_group(input: Any, group: Any = None) -> bool:
        # Only a loss scale lets a rank skip a step.
        return bool(input is True)

    return logical_and_across_model_parallel_group


def _all_true_ungrouped(wrapped: Function, session: Session) -> Function:
    return lambda input: bool(input is True)


def _why_not(context: Context) -> list[str]:
    reasons = []
    if context.arg("fp16", False):
        reasons.append("with --fp16 every step must know whether gradients overflowed")
    if "rerun_mode" in context.explicit and context.arg("rerun_mode", None) != "disabled":
        reasons.append("--rerun-mode needs an answer in every step")
    if math.isfinite(context.arg("grad_norm_skip_threshold", None) or math.inf):
        reasons.append("--grad-norm-skip-threshold skips steps by the norm")
    return reasons


def _arguments(context: Context) -> dict[str, Any]:
    return {} if context.host_args is None else {"rerun_mode": "disabled"}


FEATURE = Feature(
    name=NAME,
    summary="losses, norms and checks are read at log intervals, not in every step",
    numerics="ulp",
    theme="host",
    condition=_why_not,
    conflicting_args={
        "check_for_spiky_loss": "--check-for-spiky-loss compares each loss on the host",
        "check_for_large_grads": "--check-for-large-grads compares each norm on the host",
    },
    not_auto="Megatron's reruns, which tell hardware faults from others, are off with it: enable it with its flag",
    arguments=_arguments,
    memory="not predicted: two values for each check between two logs",
    unsupported={"<0.17": "megatron.training is not in the wheel by which its functions are verified"},
    patches=(
        Override(f"{_CLIP}:get_grad_norm_fp32", _norm),
        Provide(f"{_CLIP}:multi_tensor_scale_tensor_impl", lambda session: multi_tensor_scale_tensor),
        Override("megatron.core.rerun_state_machine:RerunStateMachine.validate_result", _validate),
        Around(f"{_OPTIMIZER}:MixedPrecisionOptimizer.get_loss_scale", _loss_scale),
        Around(f"{_OPTIMIZER}:FP32Optimizer.get_loss_scale", _loss_scale),
        Around(f"{_OPTIMIZER}:MegatronOptimizer.scale_loss", _scale_loss),
        *(
            Override(f"{module}:{name}_across_model_parallel_group", make, versions=versions)
            for module, versions, makes in (
                (f"{_TRAINING}.utils", "<0.18", (_reduce_max_ungrouped, _all_true_ungrouped)),
                (f"{_TRAINING}.utils.common_utils", ">=0.18,<0.19", (_reduce_max_ungrouped, _all_true_ungrouped)),
                (f"{_TRAINING}.utils.common_utils", ">=0.19", (_reduce_max, _all_true)),
            )
            for name, make in zip(("reduce_max_stat", "logical_and"), makes, strict=True)
        ),
        Around(f"{_TRAINING}.training:training_log", _log),
        Around(f"{_TRAINING}.checkpointing:save_checkpoint", _save),
    ),
)
