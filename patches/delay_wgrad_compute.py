"""`--delay-wgrad-compute`: the schedule that overlaps expert communication computes weight gradients when it asks.

Reaches the column and row parallel linear layers of the local implementation inside transformer layers: their
backward pass computes the gradient of the input and puts that of the weight aside until `backward_dw()`, which
Megatron calls in the combined schedule of `--overlap-moe-expert-parallel-comm` (its only caller, and without it
Megatron refuses the flag). The linear layer has a way to leave its weight gradient to somebody else, made for the
output layer: a buffer that takes the output's gradient. Each call is given a buffer of its own, so that no line of
the layer is replaced. Gradient reduction then waits for the delayed gradient as it does with Transformer Engine's.
Leaves the embedding, the output layer, which nobody asks, and Transformer Engine's layers alone. Steps aside where
gradients are not accumulated in the product (`--gradient-accumulation-fusion`), for frozen weights, and where
gradient reduction overlaps the backward pass without knowing of the delay.

Same products, same order for each weight: the same bits as without the delay. What nobody has asked for when
gradients are reduced is computed then, and said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mindspeed_lite.engine import Context, Feature, Option, Provide, Session, Wrap
from mindspeed_lite.pipeline.wgrad import WgradQueue

from . import _main_grad

ARGUMENT = "delay_wgrad_compute"
_LAYERS = "megatron.core.tensor_parallel.layers"
_DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"
_QUEUE = "wgrad_queue"
# What Megatron's gradient reduction looks for in a parameter and in its module.
_PARAMETER_IS_LATE = "skip_backward_post_hook"
_TELL_WHEN_DONE = "register_wgrad_accumulation_and_reduce_hooks"


class _Handover:
    """Where Megatron's linear layer leaves the gradient of its output instead of computing that of its weight."""

    def __init__(self, layer: Any, input_: torch.Tensor, sequence_parallel: bool) -> None:
        self.layer = layer
        self.input = input_.detach()
        self.sequence_parallel = sequence_parallel

    def append(self, grad_output: torch.Tensor) -> None:
        getattr(self.layer, _QUEUE).put(lambda: self._compute(grad_output))

    def _compute(self, grad_output: torch.Tensor) -> None:
        from megatron.core.tensor_parallel import mappings

        weight = self.layer.weight
        with torch.no_grad():
            total = self.input
            if self.sequence_parallel:
                total = mappings.gather_from_sequence_parallel_region(total, group=self.layer.tp_group)
            _main_grad.add(weight.main_grad, grad_output.flatten(0, -2), total.flatten(0, -2))


def put(layer: Any, compute: Callable[[], None]) -> bool:
    """Put a weight gradient of `layer` aside that somebody else computes; False if the layer delays none."""
    queue = getattr(layer, _QUEUE, None)
    if queue is not None:
        queue.put(compute)
    return queue is not None


def _init(wrapped: Callable[..., None], session: Session) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        wrapped(self, *args, **kwargs)
        # Layers inside a transformer layer have such a name; the output layer has none.
        if kwargs.get("tp_comm_buffer_name") is None or not getattr(self.config, ARGUMENT, False):
            return
        if not self.gradient_accumulation_fusion:
            session.fallback(FEATURE.name, "the model's configuration has no gradient_accumulation_fusion")
            return
        queue = WgradQueue()
        setattr(self, _QUEUE, queue)
        setattr(self, _TELL_WHEN_DONE, queue.call_after_each)
        setattr(self.weight, _PARAMETER_IS_LATE, True)

    return __init__


def _forward(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def _forward_impl(self: Any, input: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
        # Without a main gradient there is no training step, and a weight that is handed in is not the layer's.
        if (
            getattr(self, _QUEUE, None) is not None
            and weight is self.weight
            and weight.requires_grad
            and hasattr(weight, "main_grad")
            and torch.is_grad_enabled()
        ):
            kwargs["grad_output_buffer"] = _Handover(self, input, kwargs["sequence_parallel"])
            kwargs["wgrad_deferral_limit"] = 0
        return wrapped(self, input, weight, *args, **kwargs)

    return _forward_impl


def _backward_dw(wrapped: Callable[..., None], session: Session) -> Callable[..., None]:
    def backward_dw(self: Any) -> None:
        wrapped(self)
        _drain(self)

    return backward_dw


def _drain(layer: Any) -> int:
    queue = getattr(layer, _QUEUE, None)
    return queue.drain() if queue else 0


def _queued(model: Any) -> Iterator[Any]:
    return (each for each in model.modules() if getattr(each, _QUEUE, None) is not None)


def _reduction(wrapped: Callable[..., None], session: Session) -> Callable[..., None]:
    def __init__(self: Any, config: Any, ddp_config: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(config, ARGUMENT, False) and ddp_config.overlap_grad_reduce and not ddp_config.delay_wgrad_compute:
            session.fallback(
                FEATURE.name,
                "overlap_grad_reduce without delay_wgrad_compute in DistributedDataParallelConfig would reduce "
                "gradients that are not there",
            )
            for layer in _queued(module):
                setattr(layer, _QUEUE, None)
        wrapped(self, config, ddp_config, module, *args, **kwargs)

    return __init__


def _end_of_step(wrapped: Callable[..., None], session: Session) -> Callable[..., None]:
    def finish_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        if sum(map(_drain, _queued(self.module))):
            session.fallback(FEATURE.name, "no schedule has asked for some weight gradients before they are reduced")
        wrapped(self, *args, **kwargs)

    return finish_grad_sync


def _why_not(context: Context) -> Sequence[str]:
    reasons = []
    if context.arg("transformer_impl", "local") == "transformer_engine":
        reasons.append("--transformer-impl transformer_engine delays weight gradients itself")
    settings = context.settings
    if not settings.get("use_gradient_accumulation_fusion", True) and not settings.get("mindspeed_lite_auto", False):
        reasons.append("--gradient-accumulation-fusion is off: the delayed product is the one that accumulates")
    if context.host_args is not None and not context.arg("overlap_moe_expert_parallel_comm", False):
        reasons.append("--overlap-moe-expert-parallel-comm is off: no other schedule asks for delayed gradients")
    if context.arg("cpu_offloading_num_layers", 0):
        reasons.append("--cpu-offloading-num-layers takes inputs away that are still needed")
    if context.arg("cuda_graph_impl", "none") != "none":
        reasons.append("--cuda-graph-impl records a backward pass of which a part is missing")
    return reasons


def _adjust(context: Context) -> Mapping[str, Any]:
    return {} if context.host_args is None else {ARGUMENT: True}


FEATURE = Feature(
    name="delay_wgrad_compute",
    summary="weight gradients computed when the schedule that overlaps expert communication asks for them",
    options=(
        Option(
            "--delay-wgrad-compute",
            help="Compute weight gradients apart from the rest of the backward pass.",
            upstream=">=0.16,<0.20",
        ),
    ),
    numerics="bitwise",
    condition=_why_not,
    adjust=_adjust,
    patches=(
        Wrap(f"{_LAYERS}:ColumnParallelLinear.__init__", _init),
        Wrap(f"{_LAYERS}:RowParallelLinear.__init__", _init),
        Wrap(f"{_LAYERS}:ColumnParallelLinear._forward_impl", _forward),
        Wrap(f"{_LAYERS}:RowParallelLinear._forward_impl", _forward),
        Wrap(f"{_LAYERS}:ColumnParallelLinear.backward_dw", _backward_dw),
        Wrap(f"{_LAYERS}:RowParallelLinear.backward_dw", _backward_dw, versions=">=0.17"),
        Provide(f"{_LAYERS}:RowParallelLinear.backward_dw", lambda session: _drain, versions="<0.17"),
        Wrap(f"{_DDP}.__init__", _reduction),
        Wrap(f"{_DDP}.finish_grad_sync", _end_of_step),
    ),
)
