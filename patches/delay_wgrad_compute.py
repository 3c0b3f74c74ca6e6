"""`--delay-wgrad-compute`: compute weight gradients when the schedule asks for them.

Reaches local linear layers of transformer layers: their `grad_output_buffer` queues weight gradients until
`backward_dw()`, which Megatron's combined schedule calls, or until reduction. Bitwise equal. So do Transformer Engine's
linear layers for a schedule with steps for them. Leaves embedding and output layer alone. Falls back without
`--gradient-accumulation-fusion`, for frozen weights, and where overlapped reduction ignores the delay.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mindspeed_lite.engine import Around, Context, Feature, Function, Option, Override, Provide, Session
from mindspeed_lite.pipeline.wgrad import WgradQueue
from mindspeed_lite.platform.megatron import DDP_CONFIG

from . import moe_fb_overlap
from ._shared import linear_layers, pipeline_orders
from ._shared.conditions import cuda_graph_args, local
from ._shared.pipeline_passes import QUEUE as _QUEUE
from ._shared.wrappers import act_again, after, at_end, before

ARGUMENT = "delay_wgrad_compute"
_LAYERS = "megatron.core.tensor_parallel.layers"
_DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"
_READS = ("config", "gradient_accumulation_fusion", "weight")
_HANDOVERS = "wgrad_handovers"
_LIMIT = 1
_PARAMETER_IS_LATE = "skip_backward_post_hook"
_TELL_WHEN_DONE = "register_wgrad_accumulation_and_reduce_hooks"


class _Handover:
    def __init__(self, layer: Any, input_: Tensor, sequence_parallel: bool) -> None:
        self.layer = layer
        self.input = input_.detach()
        self.sequence_parallel = sequence_parallel
        self.taken = False

    def __len__(self) -> int:
        """Full once the feature has ended, so that nothing is queued."""
        return _LIMIT if getattr(self.layer, _QUEUE, None) is None else 0

    def append(self, grad_output: Tensor) -> None:
        self.taken = True
        getattr(self.layer, _QUEUE).put(lambda: self._compute(grad_output))

    def _compute(self, grad_output: Tensor) -> None:
        from megatron.core.tensor_parallel import mappings

        weight = self.layer.weight
        with torch.no_grad():
            total = self.input
            if self.sequence_parallel:
                total = mappings.gather_from_sequence_parallel_region(total, group=self.layer.tp_group)
            linear_layers.add_wgrad(weight.main_grad, grad_output.flatten(0, -2), total.flatten(0, -2))
        # Autograd's placeholder must not be added.
        weight.grad_added_to_main_grad = True


def put(layer: Any, compute: Callable[[], None]) -> bool:
    """Queue a weight gradient; False if the layer delays none."""
    queue = getattr(layer, _QUEUE, None)
    if queue is not None:
        queue.put(compute)
    return queue is not None


def _order_asks(session: Session) -> bool:
    return pipeline_orders.delays_weight_gradients(pipeline_orders.active_settings(session))


def _is_asked_for(config: Any, session: Session) -> bool:
    return getattr(config, ARGUMENT, False) or _order_asks(session)


#: DDP -> layer -> its queue's hooks with their handles and nodes at autograd, while the feature is off.
_given_back: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _init(wrapped: Function, session: Session) -> Function:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        wrapped(self, *args, **kwargs)
        # Layers of a transformer layer have such a name; the output layer has none.
        if kwargs.get("tp_comm_buffer_name") is None or not _is_asked_for(self.config, session):
            return
        if not self.gradient_accumulation_fusion:
            session.fallback(FEATURE.name, "the model's configuration has no gradient_accumulation_fusion")
            return
        _queue(session, self)

    return __init__


def _queue(session: Session, layer: Any) -> None:
    queue = WgradQueue()
    if hasattr(layer, "wgrad_store"):
        linear_layers.take_gradients(session, layer, queue.put)
        session.mark(layer, "backward_dw", functools.partial(backward_dw, layer))
    session.mark(layer, _QUEUE, queue)
    session.mark(layer, _TELL_WHEN_DONE, queue.call_when_done)
    for param in linear_layers.delayed_parameters(layer):
        session.mark(param, _PARAMETER_IS_LATE, True)
    session.on_end(functools.partial(_end, session, weakref.ref(layer), queue))


def _end(session: Session, reference: weakref.ref[Any], queue: WgradQueue) -> None:
    layer = reference()
    handovers = session.find(_HANDOVERS) or ()
    to_come = any(each.layer is layer and not each.taken for each in handovers)
    if queue.drain(announce=not to_come) and layer is not None:
        for param in linear_layers.delayed_parameters(layer):
            param.grad_added_to_main_grad = False
            if to_come:
                param.grad = None


def _forward(wrapped: Function, session: Session) -> Function:
    def _forward_impl(self: Any, input: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
        # Not for a weight passed in, nor outside training.
        if (
            getattr(self, _QUEUE, None) is not None
            and weight is self.weight
            and weight.requires_grad
            and hasattr(weight, "main_grad")
            and torch.is_grad_enabled()
        ):
            handover = _Handover(self, input, kwargs["sequence_parallel"])
            under_way: weakref.WeakSet[_Handover] = session.state(_HANDOVERS, weakref.WeakSet)
            under_way.add(handover)
            kwargs["grad_output_buffer"] = handover
            kwargs["wgrad_deferral_limit"] = _LIMIT
            bias = kwargs.get("bias")
            if bias is not None:
                # Megatron would round a deferred bias gradient twice.
                return wrapped(self, input, weight, *args, **{**kwargs, "bias": None}) + bias
        return wrapped(self, input, weight, *args, **kwargs)

    return _forward_impl


def backward_dw(layer: Any) -> None:
    """Compute queued gradients, unless a pipeline schedule has steps for them."""
    queue = getattr(layer, _QUEUE, None)
    if queue and not queue.is_kept:
        queue.drain()


def _drain_asked(session: Session, layer: Any) -> None:
    backward_dw(layer)


def _drain(layer: Any) -> int:
    queue = getattr(layer, _QUEUE, None)
    return queue.drain() if queue else 0


def _queued(model: Any) -> Iterator[Any]:
    return (each for each in model.modules() if getattr(each, _QUEUE, None) is not None)


def _reduction(wrapped: Function, session: Session) -> Function:
    def __init__(self: Any, config: Any, ddp_config: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        if _order_asks(session):
            session.mark(ddp_config, ARGUMENT, True)
            for layer in linear_layers.te_layers(module):
                if reason := linear_layers.why_not(layer):
                    session.fallback(FEATURE.name, reason)
                else:
                    _queue(session, layer)
        elif getattr(config, ARGUMENT, False) and any(True for _ in linear_layers.te_layers(module)):
            # Transformer Engine's gradients come after autograd's hooks, with overlap and without.
            session.mark(ddp_config, ARGUMENT, True)
        elif getattr(config, ARGUMENT, False) and ddp_config.overlap_grad_reduce and not ddp_config.delay_wgrad_compute:
            session.fallback(
                FEATURE.name,
                "overlap_grad_reduce without delay_wgrad_compute in DistributedDataParallelConfig would reduce "
                "gradients that are not there",
            )
            for layer in _queued(module):
                session.mark(layer, _QUEUE, None)
        wrapped(self, config, ddp_config, module, *args, **kwargs)
        _complete_wrappers(session, module)
        at_end(session, self, _reduce_as_it_comes)

    act_again(session, _given_back, functools.partial(_reduce_later_again, session))
    return __init__


def _reduce_later_again(session: Session, ddp: Any) -> None:
    if _order_asks(session):
        session.mark(ddp.ddp_config, ARGUMENT, True)
    for layer, given in _given_back.pop(ddp).items():
        _queue(session, layer)
        for hook, handle, accumulator in given:
            handle.remove()
            ddp.grad_accs.remove(accumulator)
            getattr(layer, _QUEUE).call_when_done(hook)
    _complete_wrappers(session, ddp.module)
    at_end(session, ddp, _reduce_as_it_comes)


def _complete_wrappers(session: Session, module: torch.nn.Module) -> None:
    """Give wrappers of linear layers, such as LoRA adapters, the `backward_dw` that Megatron's schedule calls."""
    for owner in module.modules():
        for name, child in owner.named_children():
            if name.startswith("linear_") and not hasattr(child, "backward_dw"):
                session.mark(child, "backward_dw", functools.partial(_backward_dw_within, child))


def _backward_dw_within(wrapper: torch.nn.Module) -> None:
    for layer in wrapper.modules():
        backward_dw(layer)


def _reduce_as_it_comes(ddp: Any) -> None:
    """Let autograd call the queues' hooks, as for parameters without delay."""
    given = _given_back[ddp] = weakref.WeakKeyDictionary[Any, Any]()
    for layer in _queued(ddp.module):
        hooks = getattr(layer, _QUEUE).hooks
        given[layer] = []
        for hook, param in zip(hooks, linear_layers.delayed_parameters(layer), strict=False):
            with torch.enable_grad():
                accumulator = param.expand_as(param).grad_fn.next_functions[0][0]
            given[layer].append((hook, accumulator.register_hook(hook), accumulator))
            ddp.grad_accs.append(accumulator)


def _end_step(session: Session, ddp: Any) -> None:
    if sum(map(_drain, _queued(ddp.module))):
        session.fallback(FEATURE.name, "no schedule has asked for some weight gradients before they are reduced")


_is_local = local("delays weight gradients itself, with this flag")


def _why_not(context: Context) -> list[str]:
    reasons: list[str] = []
    settings = context.settings
    if not settings.get("use_gradient_accumulation_fusion", True) and not settings.get("mindspeed_lite_auto", False):
        reasons.append("--gradient-accumulation-fusion is off: the delayed product is the one that accumulates")
    is_step = pipeline_orders.delays_weight_gradients(settings)
    if not is_step and (theirs := _is_local(context)):
        # Megatron's combined schedule asks Transformer Engine's layers for them.
        return [] if settings.get("moe_fb_overlap") else theirs
    if _is_local(context) and context.arg("tp_comm_overlap", False):
        reasons.append("--tp-comm-overlap: Transformer Engine delays no weight gradients then")
    if is_step and context.arg("use_transformer_engine_op_fuser", False):
        reasons.append(
            "--use-transformer-engine-op-fuser runs no linear layers whose weight gradients could be delayed"
        )
    is_asked_for = is_step or (settings.get("moe_fb_overlap", False) and not moe_fb_overlap.layout_reasons(context))
    if not is_step and (found := moe_fb_overlap.release_reasons(context)):
        reasons += found
    elif context.host_args is not None and not context.arg(moe_fb_overlap.ARGUMENT, False) and not is_asked_for:
        reasons.append("--overlap-moe-expert-parallel-comm is off: no other schedule asks for delayed gradients")
    return reasons


FEATURE = Feature(
    name="delay_wgrad_compute",
    summary="weight gradients computed when the schedule that overlaps expert communication asks for them",
    options=(Option("--delay-wgrad-compute", upstream=">=0.13"),),
    numerics="bitwise",
    theme="experts",
    memory="not predicted: inputs and output gradients stay until the schedule asks for the weight gradient",
    unsupported={
        "<0.14": "before Megatron 0.14 gradient reduction does not wait for a weight gradient that comes later"
    },
    condition=_why_not,
    conflicting_args={
        "cpu_offloading_num_layers": "--cpu-offloading-num-layers takes inputs away that are still needed",
        **cuda_graph_args("records a backward pass of which a part is missing"),
    },
    enabled=lambda settings: (
        bool(settings.get(ARGUMENT, False) or settings.get("moe_fb_overlap", False))
        or pipeline_orders.delays_weight_gradients(settings)
    ),
    patches=(
        Around(f"{_LAYERS}:ColumnParallelLinear.__init__", _init, reads=_READS),
        Around(f"{_LAYERS}:RowParallelLinear.__init__", _init, reads=_READS),
        Override(f"{_LAYERS}:ColumnParallelLinear._forward_impl", _forward, reads=("weight", "tp_group")),
        Override(f"{_LAYERS}:RowParallelLinear._forward_impl", _forward, reads=("weight", "tp_group")),
        Around(f"{_LAYERS}:ColumnParallelLinear.backward_dw", after(_drain_asked), versions=">=0.16"),
        Around(f"{_LAYERS}:RowParallelLinear.backward_dw", after(_drain_asked), versions=">=0.17"),
        Provide(f"{_LAYERS}:RowParallelLinear.backward_dw", lambda session: backward_dw, versions=">=0.16,<0.17"),
        Around(
            f"{_DDP}.__init__",
            _reduction,
            reads=(
                f"{DDP_CONFIG}.overlap_grad_reduce",
                f"{DDP_CONFIG}.delay_wgrad_compute",
                f"{_DDP}.grad_accs",
            ),
        ),
        Around(f"{_DDP}.finish_grad_sync", before(_end_step), reads=("module",)),
    ),
)
