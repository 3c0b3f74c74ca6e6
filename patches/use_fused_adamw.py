"""`--use-fused-adamw`: Adam, clipping and the copy into the weights in one pass.

Reaches `MegatronOptimizer.__init__` (Adam or AdamW of torch, Transformer Engine or Apex gets the fused step, same state
format);
`clip_grad_by_total_norm_fp32` and `step_with_ready_grads` (clip coefficients, copy targets); `prepare_grads` (drops
leftovers); `local_multi_tensor_l2_norm` and `_scale`. Leaves fp16 unscaling alone. Falls back for other optimizers and
options, and from deferred clipping where gradients are read later.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mindspeed_lite.engine import Around, Context, Feature, Function, Option, Override, Session
from mindspeed_lite.ops.adamw import adamw
from mindspeed_lite.optim.fused_adam import StepData, adopt, release
from mindspeed_lite.optim.grad_norm import l2norm, scale_into

from ._shared.conditions import fsdp_args
from ._shared.megatron_arguments import fused_adam
from ._shared.optimizer_state import DISTRIBUTED, FLOAT16, copy_main, has_fused_step
from ._shared.wrappers import act_again, at_end, before, verify, within

# Adopted optimizer -> whether Megatron counts zeros in its gradients.
_adopted: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _init(wrapped: Function, session: Session) -> Function:
    def __init__(self: Any, optimizer: Any, config: Any, init_state_fn: Any = lambda x: None) -> None:
        wrapped(self, optimizer, config, init_state_fn)
        if optimizer is not None and not has_fused_step(optimizer):
            _take(optimizer, bool(getattr(config, "log_num_zeros_in_grad", False)), session)

    act_again(session, _adopted, lambda optimizer: _take(optimizer, _adopted[optimizer], session))
    return __init__


def _take(optimizer: Any, counts_zeros: bool, session: Session) -> None:
    """Use the fused step until the feature ends; counts_zeros: Megatron reads clipped gradients."""
    fused = adopt(optimizer)
    if fused is None:
        kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        session.fallback(FEATURE.name, f"the optimizer is {kind}, not Adam or AdamW")
        return
    _adopted[fused] = counts_zeros
    at_end(session, fused, release)
    fused.on_fallback = lambda reasons: session.fallback(FEATURE.name, "; ".join(reasons))
    if session.verifier is not None:
        fused.before_update = _verification(session)
    if counts_zeros:
        session.fallback(FEATURE.name, "--log-num-zeros-in-grad reads the clipped gradients: clipping is a pass")
    else:
        owners: weakref.WeakSet[Any] = session.state(FEATURE.name, weakref.WeakSet)
        owners.add(fused)


def _drop_deferred(session: Session, optimizer: Any) -> None:
    if has_fused_step(optimizer.optimizer):
        optimizer.optimizer.step_data = StepData()


def _clip(wrapped: Function, session: Session) -> Function:
    def clip_grad_by_total_norm_fp32(
        parameters: Any, max_norm: Any, total_norm: Any, use_decoupled_grad: bool = False
    ) -> Any:
        owners = _owners(session.find(FEATURE.name) or (), parameters)
        if use_decoupled_grad or owners is None or not isinstance(total_norm, (int, float, Tensor)):
            return wrapped(parameters, max_norm, total_norm, use_decoupled_grad)
        coefficient = max_norm / (total_norm + 1.0e-6)
        if isinstance(coefficient, Tensor):
            # Not read, so 1 scales too; a kernel takes it in fp32.
            coefficient = coefficient.clamp(max=1.0).float()
        if isinstance(coefficient, Tensor) or coefficient < 1.0:
            scales: dict[Any, dict[Tensor, float | Tensor]] = {
                owner: dict(owner.step_data.grad_scales) for _, owner in owners
            }
            for parameter, owner in owners:
                scales[owner][parameter] = coefficient
            for owner, its in scales.items():
                owner.step_data = replace(owner.step_data, grad_scales=its)
        return None

    return clip_grad_by_total_norm_fp32


def _owners(optimizers: Iterable[Any], parameters: Any) -> list[tuple[Tensor, Any]] | None:
    if isinstance(parameters, Tensor):
        return None
    owner = {
        parameter: optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    having = [parameter for parameter in parameters if parameter.grad is not None]
    if any(parameter not in owner or parameter.grad.dtype != torch.float32 for parameter in having):
        return None
    return [(parameter, owner[parameter]) for parameter in having]


@contextlib.contextmanager
def _with_cast_targets(session: Session, optimizer: Any) -> Iterator[None]:
    inner = optimizer.optimizer
    if not has_fused_step(inner):
        yield
        return
    inner.step_data = replace(inner.step_data, cast_targets=cast_targets(optimizer), casts_done=False)
    try:
        yield
    finally:
        inner.step_data = replace(inner.step_data, cast_targets={}, casts_done=False)


def cast_targets(optimizer: Any) -> dict[Tensor, Tensor]:
    """fp32 main parameter -> memory that Megatron copies it to; empty where it does more."""
    if hasattr(optimizer, "fp32_from_float16_groups"):
        pairs = zip(optimizer.fp32_from_float16_groups, optimizer.float16_groups, strict=True)
        return {main: model.data for mains, models in pairs for main, model in zip(mains, models, strict=True)}
    ddp = getattr(optimizer, "ddp_config", None)
    quantized = ("fp8_param_gather", "fp4_param_gather", "use_megatron_fsdp", "use_custom_fsdp")
    if ddp is None or any(getattr(ddp, name, False) for name in quantized):
        return {}
    found = {}
    for mains, models in (
        *zip(optimizer.shard_fp32_from_float16_groups, optimizer.model_float16_groups, strict=True),
        *zip(optimizer.shard_fp32_groups, optimizer.model_fp32_groups, strict=True),
    ):
        for main, model in zip(mains, models, strict=True):
            place = optimizer._get_model_param_range_map(model)["gbuf_world_in_bucket"]
            buffer, _, bucket = optimizer.model_param_gbuf_map[model]
            shard = optimizer.buffers[buffer].buckets[bucket].param_data.view(-1)[place.start : place.end]
            # An fp32 parameter is usually a piece of that buffer.
            if shard.untyped_storage()._cdata != main.untyped_storage()._cdata:
                found[main] = shard
    return found


def _norm(wrapped: Function, session: Session) -> Function:
    def local_multi_tensor_l2_norm(
        chunk_size: Any, noop_flag: Any, tensor_lists: Any, per_tensor: Any, *args: Any
    ) -> Any:
        tensors = [tensor for tensor_list in tensor_lists for tensor in tensor_list]
        if not tensors:
            return wrapped(chunk_size, noop_flag, tensor_lists, per_tensor, *args)
        if session.verifier is not None:
            given, against = {"largest": max(tensors, key=Tensor.numel)}, "Megatron's local_multi_tensor_l2_norm"
            ours, theirs = (lambda x: l2norm([x.detach()])), (lambda x: torch.norm(x.detach()).float())
            verify(session, FEATURE, "l2norm", ours, theirs, given, against)
        return l2norm(tensors).reshape(1), None

    return local_multi_tensor_l2_norm


def _scale(wrapped: Function, session: Session) -> Function:
    def local_multi_tensor_scale(chunk_size: Any, noop_flag: Any, tensor_lists: Any, scale: Any) -> None:
        sources, targets = tensor_lists[0], tensor_lists[1]
        if sources and all(source is target for source, target in zip(sources, targets, strict=True)):
            scale_into(targets, sources, scale)
        elif sources and scale == 1.0:
            torch._foreach_copy_(targets, sources)
        else:
            wrapped(chunk_size, noop_flag, tensor_lists, scale)

    return local_multi_tensor_scale


def _verification(session: Session) -> Function:
    names = ("param", "grad", "exp_avg", "exp_avg_sq")

    def before_update(fused: Any, group: dict[str, Any], *lists: Sequence[Tensor], **rule: Any) -> None:
        kind = torch.optim.AdamW if rule["decoupled"] else torch.optim.Adam
        scale = 1.0 if rule["grad_scale"] is None else rule["grad_scale"]

        @torch.no_grad()
        def ours(*tensors: Tensor) -> Any:
            own = [tensor.detach().clone() for tensor in tensors]
            adamw(*([tensor] for tensor in own), **rule)
            return own[0]

        @torch.no_grad()
        def torchs(*tensors: Tensor) -> Any:
            param, grad, exp_avg, exp_avg_sq = (tensor.detach().clone() for tensor in tensors)
            optimizer, param.grad = kind([{**group, "params": [param]}]), grad * scale
            step = torch.tensor(rule["step"] - 1)
            optimizer.state[param] = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
            optimizer.step()
            return param

        variant, against = "" if rule["decoupled"] else "L2", f"torch.optim.{kind.__name__}"
        for tensors in zip(*lists, strict=True):
            if tensors[0].numel():
                given = dict(zip(names, tensors, strict=True))
                verify(session, FEATURE, "adamw", ours, torchs, given, against, variant=variant)

    return before_update


def _why_not(context: Context) -> list[str]:
    optimizer = context.arg("optimizer", "adam")
    if optimizer != "adam":
        return [f"--optimizer {optimizer} is not Adam"]
    if FEATURE.is_enabled(context.settings) or not (package := fused_adam(context.device)):
        return []
    return [f"{package}'s fused Adam is used: --use-fused-adamw replaces its step"]


_OPTIMIZER = "megatron.core.optimizer.optimizer"
_COPY = "_copy_main_params_to_model_params"
_BUFFERS = "megatron.core.distributed.param_and_grad_buffer"
CAST_TARGET_READS = {
    FLOAT16: tuple(f"{FLOAT16}.{name}" for name in ("float16_groups", "fp32_from_float16_groups")),
    DISTRIBUTED: (
        *(f"{DISTRIBUTED}._get_model_param_range_map", f"{DISTRIBUTED}.buffers", f"{DISTRIBUTED}.model_param_gbuf_map"),
        *(f"{DISTRIBUTED}.model_{kind}_groups" for kind in ("float16", "fp32")),
        *(f"{DISTRIBUTED}.shard_{kind}_groups" for kind in ("fp32_from_float16", "fp32")),
        f"{_BUFFERS}:_ParamAndGradBuffer.buckets",
        f"{_BUFFERS}:_ParamAndGradBucket.param_data",
    ),
}

FEATURE = Feature(
    name="use_fused_adamw",
    summary="Adam, clipping and the copy into 16-bit weights in one pass",
    options=(Option("--use-fused-adamw"),),
    # Only this step updates split main parameters and quantized moments.
    enabled=lambda settings: any(
        settings.get(name)
        for name in ("use_fused_adamw", "reuse_fp32_param", "quant_states", "swap_optimizer", "virtual_optimizer")
    ),
    numerics="ulp",
    theme="operators",
    condition=_why_not,
    conflicting_args={
        "use_precision_aware_optimizer": "--use-precision-aware-optimizer is a property of Transformer Engine's Adam",
        "optimizer_cpu_offload": "--optimizer-cpu-offload has an optimizer of its own",
        "optimizer_cuda_graph": "--optimizer-cuda-graph records torch's step",
        **fsdp_args("has parameters that are not plain tensors"),
    },
    operators=("adamw",),
    patches=(
        Around(f"{_OPTIMIZER}:MegatronOptimizer.__init__", _init),
        Around(f"{_OPTIMIZER}:MixedPrecisionOptimizer.prepare_grads", before(_drop_deferred), reads=("optimizer",)),
        Around(f"{_OPTIMIZER}:FP32Optimizer.prepare_grads", before(_drop_deferred), reads=("optimizer",)),
        Around(
            f"{_OPTIMIZER}:MixedPrecisionOptimizer.step_with_ready_grads",
            within(_with_cast_targets),
            reads=("optimizer", *CAST_TARGET_READS[FLOAT16], *CAST_TARGET_READS[DISTRIBUTED]),
        ),
        Override(f"{FLOAT16}.{_COPY}", copy_main, reads=("optimizer",)),
        Override(f"{DISTRIBUTED}.{_COPY}", copy_main, reads=("optimizer",)),
        Override("megatron.core.optimizer.clip_grads:clip_grad_by_total_norm_fp32", _clip),
        Override("megatron.core.utils:local_multi_tensor_l2_norm", _norm),
        Override("megatron.core.utils:local_multi_tensor_scale", _scale),
    ),
)
