"""Linear layers: weight gradients and tensor-parallel communication of Megatron's local ones.

A weight gradient is added to its main gradient; autograd gets a placeholder. Experts and single-rank groups stay
Megatron's. Transformer Engine's layers delay weight gradients and hand them over, until the end of the session.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_lite.engine import Around, Function, Override, Session
from mindspeed_lite.ops.accumulate_wgrad import accumulate_wgrad
from mindspeed_lite.parallel.tp_linear import TPCommConfig, Wgrad, column_linear, row_linear

from .conditions import CUDA_GRAPH_ARGS, above_one, config_reasons, holding

LAYERS = "megatron.core.tensor_parallel.layers"
has_group = above_one("tensor_model_parallel_size", "nothing travels")


def add_wgrad(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """main_grad [N, K] += dy^T x; dy: [M, N], x: [M, K]."""
    from megatron.core.tensor_parallel import layers

    kernels = getattr(layers, "fused_weight_gradient_mlp_cuda", None)
    if kernels is None:
        # The features were disabled before this backward pass.
        accumulate_wgrad(main_grad, dy.contiguous(), x.contiguous())
        return
    wide = main_grad.dtype == torch.float32
    accumulate = kernels.wgrad_gemm_accum_fp32 if wide else kernels.wgrad_gemm_accum_fp16
    accumulate(x.contiguous(), dy.contiguous(), main_grad)


def placeholder_grad(weight: Any) -> Tensor | None:
    """Placeholder for autograd, whose hooks reduce main_grad."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return make(weight, requires_grad=False)


def _backward(wrapped: Function, session: Session) -> Function:
    def backward(ctx: Any, grad_output: Any) -> Any:
        found = wrapped(ctx, grad_output)
        if found[1] is not None or not ctx.gradient_accumulation_fusion:
            return found
        weight = getattr(ctx.next_functions[1][0], "variable", None)
        return found if weight is None else (found[0], placeholder_grad(weight), *found[2:])

    return backward


# Saved-tensor hooks copy the weight without its attributes, so Megatron would return no gradient.
PLACEHOLDER_PATCH = Around(f"{LAYERS}:LinearWithGradAccumulationAndAsyncCommunication.backward", _backward)


_OFFLOADING = "--cpu-offloading-num-layers looks for what Megatron's own linear layer saves"
CONFLICTING_ARGS = {"cpu_offloading": _OFFLOADING, "cpu_offloading_num_layers": _OFFLOADING, **CUDA_GRAPH_ARGS}
UNSUPPORTED = {"<0.14": "before Megatron 0.14 a linear layer has no method that multiplies, which could be replaced"}

_REDUCTIONS = (
    "megatron.core.tensor_parallel.mappings:reduce_from_tensor_model_parallel_region",
    "megatron.core.tensor_parallel.mappings:reduce_scatter_to_sequence_parallel_region",
)


@dataclass(frozen=True)
class LayerCall:
    layer: Any
    session: Session
    group: Any
    is_row: bool
    sequence_parallel: bool
    wgrad: Wgrad


@dataclass(frozen=True)
class _Reduced:
    """Replaces the group in a row parallel linear function, whose output is reduced there."""

    group: Any
    scattered: bool


def _wgrad(weight: Any, is_fused: bool, buffer: Any, limit: int) -> Wgrad:
    """Weight gradient that is added to the main gradient if fused; `buffer` takes deferred ones up to `limit`."""

    def defer(dy: Tensor) -> bool:
        if buffer is None or (limit and len(buffer) >= limit):
            return False
        buffer.append(dy)
        return True

    def add(dy: Tensor, x: Tensor) -> Tensor | None:
        add_wgrad(weight.main_grad, dy, x)
        return placeholder_grad(weight)

    return Wgrad(add, defer, lambda: placeholder_grad(weight)) if is_fused else Wgrad(defer=defer)


def tp_linear_patches(feature: str, comm_config_for: Callable[[LayerCall], TPCommConfig]) -> tuple[Override, ...]:
    """Patches that run linear layers with `comm_config_for(call)`."""

    def linear(wrapped: Function, session: Session) -> Function:
        def _forward_impl(self: Any, input: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
            group: Any = kwargs.get("tp_group")
            is_row = isinstance(group, _Reduced)
            talks = group is not None and (kwargs["sequence_parallel"] or kwargs["allreduce_dgrad"])
            if not is_row and not (talks and group.size() > 1 and _is_served(self, input, weight, session, feature)):
                return wrapped(self, input, weight, *args, **kwargs)
            group, scattered = (group.group, group.scattered) if is_row else (group, kwargs["sequence_parallel"])
            fused = kwargs["gradient_accumulation_fusion"] and hasattr(weight, "main_grad")
            buffer, limit = kwargs.get("grad_output_buffer"), kwargs.get("wgrad_deferral_limit")
            gradient = _wgrad(weight, fused, buffer, limit or 0)
            comm = comm_config_for(LayerCall(self, session, group, is_row, scattered, gradient))
            if is_row:
                return row_linear(input, weight, comm)
            return column_linear(input, weight, kwargs["bias"], comm)

        return _forward_impl

    def row(wrapped: Function, session: Session) -> Function:
        def forward(self: Any, input_: Any) -> Any:
            group = self.tp_group
            if self.explicit_expert_comm or group is None or group.size() == 1:
                return wrapped(self, input_)
            if not self.input_is_parallel:
                session.fallback(feature, "a row parallel layer has yet to split its input over the ranks")
                return wrapped(self, input_)
            if not _is_served(self, input_, self.weight, session, feature):
                return wrapped(self, input_)
            output = self._forward_impl(
                input=input_,
                weight=self.weight,
                bias=None,
                gradient_accumulation_fusion=self.gradient_accumulation_fusion,
                allreduce_dgrad=False,
                sequence_parallel=False,
                tp_group=_Reduced(group, self.sequence_parallel),
                grad_output_buffer=None,
            )
            if self.skip_bias_add:
                return output, self.bias
            return output if self.bias is None else output + self.bias, None

        return forward

    return (
        # Inside the wrap of --delay-wgrad-compute, whose buffer it serves.
        Override(f"{LAYERS}:ColumnParallelLinear._forward_impl", linear, reads=("config",), order=-10),
        Override(f"{LAYERS}:RowParallelLinear._forward_impl", linear, reads=("config",), order=-10),
        Override(f"{LAYERS}:RowParallelLinear.forward", row, relies_on=_REDUCTIONS),
    )


def _is_served(layer: Any, input: Any, weight: Any, session: Session, feature: str) -> bool:
    reasons = holding(
        {
            "input and weight differ in dtype": input.dtype != weight.dtype,
            "autocast is on": torch.is_autocast_enabled(input.device.type),
            "the output is to have another dtype": getattr(layer, "output_dtype", None) is not None,
            "a weight is distributed": getattr(layer, "gtp_remat_size", 1) > 1 or hasattr(weight, "__fsdp_param__"),
        }
    )
    reasons += dict.fromkeys(config_reasons(CONFLICTING_ARGS, layer.config))
    if reasons:
        session.fallback(feature, "; ".join(reasons))
    return not reasons


def is_column_parallel(layer: Any) -> bool:
    """Whether it is Megatron's own layer, on its functions or Transformer Engine's, and no adapter."""
    kind = type(layer)
    is_megatrons = kind.__module__.startswith("megatron.core.")
    return is_megatrons and kind.__name__ in ("ColumnParallelLinear", "TEColumnParallelLinear")


def te_layers(model: Any) -> Iterator[Any]:
    """Transformer Engine's linear layers, which keep the inputs of their weight gradients."""
    return (each for each in model.modules() if getattr(each, "wgrad_store", None) is not None)


def delayed_parameters(layer: Any) -> list[Any]:
    """Parameters with delayed gradients of a Megatron or Transformer Engine layer, in their order."""
    if not hasattr(layer, "wgrad_store"):
        return [layer.weight]
    kinds = ("weight", "bias") if multiplies_bias(layer) else ("weight",)
    found = layer.named_parameters(recurse=False)
    return [param for name, param in found if name.startswith(kinds) and param.requires_grad]


def multiplies_bias(layer: Any) -> bool:
    """Whether the bias gradient is computed with the delayed weight gradient."""
    return layer.apply_bias and not getattr(layer, "gemm_bias_unfused_add", False)


def why_not(layer: Any) -> str:
    """Why a layer's gradients cannot be delayed; "" if they can."""
    config = getattr(layer, "config", None)
    if config is None:
        return "a layer of Transformer Engine is not one of Megatron's"
    if getattr(config, "use_transformer_engine_op_fuser", False):
        return "--use-transformer-engine-op-fuser runs no linear layers"
    if not layer.fuse_wgrad_accumulation:
        return "the model's configuration has no gradient_accumulation_fusion"
    if multiplies_bias(layer) and (config.fp8 or getattr(config, "fp4", None)):
        return "in fp8 or fp4 Transformer Engine's biases have their gradients at once"
    return ""


def take_gradients(session: Session, layer: Any, take: Callable[[Callable[[], None]], object]) -> None:
    """Call `take(compute)` in the layer's backward pass instead of computing its weight gradients."""
    theirs = next(each for each in type(layer).__mro__ if each.__module__.partition(".")[0] == "transformer_engine")
    late = {id(param) for param in delayed_parameters(layer)}
    biases = [each for name, each in layer.named_parameters() if name.startswith("bias") and id(each) in late]

    def compute(held: tuple[Any, Any]) -> None:
        # The store drops what another stream may still read.
        for bias in biases:
            bias.grad = None
        theirs.backward_dw(layer)  # type: ignore[attr-defined]
        for bias in biases:
            bias.main_grad.add_(bias.grad)
            # The gradient stays as a placeholder for the reduction's hook.
            bias.grad_added_to_main_grad = True

    store = type(layer.wgrad_store)(True)
    put = store.put

    def put_later(tensors: Any, function: Any) -> None:
        put(tensors, function)
        take(functools.partial(compute, (tensors, function)))

    store.put = put_later
    session.mark(layer, "wgrad_store", store)
    # A backward pass after the session computes at once.
    session.on_end(store.disable_delay_wgrad_compute)
