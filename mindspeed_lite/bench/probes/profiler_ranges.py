"""Adds profiler ranges around parts of the model for one step.

Reaches module forwards by class name, some Megatron functions, and waits for collectives. Unknown modules belong to
their caller's range.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch.autograd.profiler import record_function

from mindspeed_lite.engine import Around, Session
from mindspeed_lite.platform import megatron

PREFIX = "mindspeed_lite::"
COMMUNICATION = "communication exposed"

# Part of a class name -> category, first match. A linear layer with fused norm is linear.
CLASSES: tuple[tuple[str, str], ...] = (
    ("Linear", "linear"),
    ("Norm", "norm"),
    ("DotProductAttention", "attention"),
    ("Rotary", "rotary"),
    ("Embedding", "embedding"),
    ("Router", "moe"),
    ("MoELayer", "moe"),
    ("MLP", "activation"),
)

_REDUCTION = "gradient accumulation and reduction"
_CORE = "megatron.core."
# Functions by category; a release may lack some.
FUNCTIONS: tuple[tuple[str, str], ...] = (
    ("rotary", "models.common.embeddings.rope_utils:apply_rotary_pos_emb"),
    ("rotary", "models.common.embeddings.rope_utils:apply_rotary_pos_emb_with_cos_sin"),
    ("loss", "models.common.language_module.language_module:LanguageModule.compute_language_model_loss"),
    ("loss", "tensor_parallel.cross_entropy:vocab_parallel_cross_entropy"),
    ("loss", "pipeline_parallel.schedules:forward_step_calc_loss"),
    ("optimizer", "optimizer.optimizer:MixedPrecisionOptimizer.step"),
    ("optimizer", "optimizer.optimizer:FP32Optimizer.step"),
    ("optimizer", "optimizer.optimizer:ChainedOptimizer.step"),
    ("optimizer", "optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer.step"),
    ("optimizer", "optimizer.optimizer:Float16OptimizerWithFloat16Params.zero_grad"),
    ("optimizer", "optimizer.optimizer:FP32Optimizer.zero_grad"),
    ("optimizer", "optimizer.optimizer:ChainedOptimizer.zero_grad"),
    ("optimizer", "optimizer.distrib_optimizer:DistributedOptimizer.zero_grad"),
    (_REDUCTION, "distributed.distributed_data_parallel:DistributedDataParallel.start_grad_sync"),
    (_REDUCTION, "distributed.distributed_data_parallel:DistributedDataParallel.finish_grad_sync"),
    (_REDUCTION, "distributed.distributed_data_parallel:DistributedDataParallel.zero_grad_buffer"),
    # Called by hooks of parameters.
    (_REDUCTION, "distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_grad_sync"),
    (_REDUCTION, "distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.finish_grad_sync"),
    (_REDUCTION, "distributed.finalize_model_grads:finalize_model_grads"),
)


@functools.cache
def category_of(name: str) -> str | None:
    return next((category for word, category in CLASSES if word in name), None)


def _around(category: str) -> Callable[[Callable[..., Any], Session], Callable[..., Any]]:
    def around(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with record_function(PREFIX + category):
                return wrapped(*args, **kwargs)

        return call

    return around


def _is_loaded(target: str) -> bool:
    """True if the loaded module has the target; a class must define the method itself."""
    name, _, path = target.partition(":")
    found: Any = sys.modules.get(name)
    for part in path.split("."):
        if found is None or part not in vars(found):
            return False
        found = vars(found)[part]
    return True


def _replace(stack: ExitStack, owner: Any, name: str, category: Callable[[Any], str | None]) -> None:
    before = vars(owner)[name]

    @functools.wraps(before)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = category(self)
        with nullcontext() if found is None else record_function(PREFIX + found):
            return before(self, *args, **kwargs)

    setattr(owner, name, call)
    stack.callback(setattr, owner, name, before)


def install() -> Callable[[], None]:
    targets = [(category, _CORE + target) for category, target in FUNCTIONS if _is_loaded(_CORE + target)]
    stack = ExitStack()
    try:
        if targets:
            patches = (Around(target, _around(category)) for category, target in targets)
            feature = megatron.without_flag("scopes", "ranges for the profiler around the parts of a model", *patches)
            stack.callback(megatron.ImportHook(feature).remove)
        _replace(stack, torch.nn.Module, "__call__", lambda module: category_of(type(module).__name__))
        if torch.distributed.is_available():
            _replace(stack, torch.distributed.Work, "wait", lambda work: COMMUNICATION)
    except BaseException:
        stack.close()
        raise
    return stack.close


__all__ = ["install"]
