"""Adds named ranges for torch's profiler around the parts of a model, while one step is measured.

Reaches, between `install()` and the undo it returns: the forward of every module, which torch's global hooks tell from
the class's name (norms, linear layers, attention, ...); the functions of Megatron that are no module's forward (rotary
embedding, loss, optimizer, gradient reduction); and the wait for a collective, in which the synchronous functions of
`torch.distributed` end too. Numbers do not change: a range around a call is all that is added. A module whose class
name says nothing belongs to the range it is called in.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.nn.modules import module as torch_module

from mindspeed_lite.engine import Around, Session
from mindspeed_lite.platform import megatron

# The ranges are called PREFIX + category; `mindspeed_lite.bench.breakdown` reads them.
PREFIX = "mindspeed_lite::"
COMMUNICATION = "communication exposed"

# What a class's name contains, to category; the first that fits. A linear layer with a norm fused into it is linear.
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
# Functions and methods by category. Releases differ in which of them they have; those that are missing are passed over.
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
    # A configuration holds some of the outer functions by value; what they call is found by name.
    (_REDUCTION, "distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_grad_sync"),
    (_REDUCTION, "distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.finish_grad_sync"),
    (_REDUCTION, "distributed.finalize_model_grads:finalize_model_grads"),
    (_REDUCTION, "distributed.finalize_model_grads:_allreduce_conditional_embedding_grads"),
    (_REDUCTION, "distributed.finalize_model_grads:_allreduce_word_embedding_grads"),
    (_REDUCTION, "distributed.finalize_model_grads:_allreduce_position_embedding_grads"),
    (_REDUCTION, "distributed.finalize_model_grads:_allreduce_router_grads"),
    (_REDUCTION, "distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads"),
    (_REDUCTION, "distributed.finalize_model_grads:_allreduce_replicated_grads_over_gtp_remat_group"),
)


@functools.cache
def category_of(name: str) -> str | None:
    """The category of a module class of this name."""
    return next((category for word, category in CLASSES if word in name), None)


class _Ranges(threading.local):
    """The ranges of the modules that are in their forward on this thread, the innermost last."""

    def __init__(self) -> None:
        self.open: list[tuple[Any, Any]] = []

    def close(self, until: int) -> None:
        while len(self.open) > until:
            self.open.pop()[1].__exit__(None, None, None)


def _hook_modules() -> Callable[[], None]:
    """A range around the forward of every module with a category."""
    ranges = _Ranges()

    def enter(module: Any, inputs: Any) -> None:
        category = category_of(type(module).__name__)
        if category is not None:
            opened: Any = record_function(PREFIX + category)
            opened.__enter__()
            ranges.open.append((module, opened))

    def leave(module: Any, inputs: Any, output: Any) -> None:
        # A forward that raised may have left ranges behind it; they end with the first module that is still there.
        for position in reversed(range(len(ranges.open))):
            if ranges.open[position][0] is module:
                ranges.close(position)
                return

    handles = (
        torch_module.register_module_forward_pre_hook(enter),
        torch_module.register_module_forward_hook(leave, always_call=True),
    )

    def undo() -> None:
        for handle in handles:
            handle.remove()
        ranges.close(0)

    return undo


def _around(category: str) -> Callable[[Callable[..., Any], Session], Callable[..., Any]]:
    def around(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with record_function(PREFIX + category):
                return wrapped(*args, **kwargs)

        return call

    return around


def _loaded(target: str) -> bool:
    """Whether the target's module is imported and has it; a class counts only if the method is its own."""
    name, _, path = target.partition(":")
    found: Any = sys.modules.get(name)
    for part in path.split("."):
        if found is None or part not in vars(found):
            return False
        found = vars(found)[part]
    return True


def _wrap_functions() -> Callable[[], Any]:
    """A range around each of Megatron's functions that is there."""
    targets = [(category, _CORE + target) for category, target in FUNCTIONS if _loaded(_CORE + target)]
    if not targets:
        return lambda: None
    feature = megatron.always(
        "scopes",
        "ranges for the profiler around the parts of a model",
        *(Around(target, _around(category)) for category, target in targets),
    )
    return megatron.place(feature).remove


def _wrap_waiting() -> Callable[[], None]:
    """A range around the wait for a collective: all of `torch.distributed` waits by this one method."""
    if not torch.distributed.is_available():
        return lambda: None
    work: Any = torch.distributed.Work
    before = vars(work)["wait"]

    @functools.wraps(work.wait)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        with record_function(PREFIX + COMMUNICATION):
            return before(self, *args, **kwargs)

    work.wait = wait

    def undo() -> None:
        work.wait = before

    return undo


def install() -> Callable[[], None]:
    """Open the ranges from now on; the function returned takes everything back and may be called again."""
    undos: list[Callable[[], Any]] = []

    def undo() -> None:
        while undos:
            undos.pop()()

    try:
        for make in (_wrap_functions, _wrap_waiting, _hook_modules):
            undos.append(make())
    except BaseException:
        undo()
        raise
    return undo


__all__ = ["install"]
