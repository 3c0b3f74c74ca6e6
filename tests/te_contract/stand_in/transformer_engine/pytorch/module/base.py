"""What all linear layers share: parameters, their gradients now or later, and extra state."""

from __future__ import annotations

import contextlib
import functools
import queue
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...recorded import keep, recorded
from ..collectives import size_of


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """A gradient for autograd where the true one was added to `main_grad`."""
    return torch.zeros(shape, dtype=dtype) if zero else torch.empty(shape, dtype=dtype)


class WeightGradStore:
    """Weight gradients to compute later, first in first out."""

    def __init__(self, delay_wgrad_compute: bool = False, ub_bulk_wgrad: bool = False) -> None:
        self.context: queue.Queue[Any] | None = queue.Queue() if delay_wgrad_compute else None
        self.enabled = delay_wgrad_compute

    def delay_wgrad_compute(self) -> bool:
        """Whether gradients are delayed."""
        return self.enabled

    def enable_delay_wgrad_compute(self) -> None:
        """Delay from now on."""
        self.enabled = True

    def disable_delay_wgrad_compute(self) -> None:
        """Compute at once from now on."""
        self.enabled = False

    def put(self, tensor_list: list[Any], func: Callable[..., Any]) -> None:
        """Delay `func(*tensor_list)`."""
        assert self.enabled and self.context is not None, "delay_wgrad_compute is not enabled"
        self.context.put([tensor_list, func])

    def pop(self) -> tuple[Any, list[Any]]:
        """Call what was delayed first."""
        assert self.enabled and self.context is not None, "delay_wgrad_compute is not enabled"
        if self.context.empty():
            raise RuntimeError("Pop empty queue.")
        tensor_list, func = self.context.get()
        return func(*tensor_list), tensor_list

    def assert_empty(self) -> None:
        """Nothing is delayed."""
        assert self.context is not None and self.context.empty(), "Queue is not empty."


class ExtraState(torch.nn.Module):
    """An empty extra state in checkpoints, where fp8 would have its scales."""

    def get_extra_state(self) -> torch.Tensor:
        """No state."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Accept no state only."""
        if state is not None and state.numel():
            raise RuntimeError("Transformer Engine's stand-in loads no state of fp8")


class TransformerEngineBaseModule(ExtraState):
    """Base of linear layers."""

    wgrad_store: WeightGradStore

    @recorded
    def __init__(self, given: Any) -> None:
        super().__init__()
        self.name = given.name
        self.fp8 = self.fp8_calibration = self.fp8_initialized = self.primary_weights_in_fp8 = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None}
        self.wgrad_accumulation_and_reduce_hooks: list[Callable[[], None]] = []

    def _build(self, given: Any, suffixes: Sequence[Any]) -> None:
        """This rank's weights and biases, by the ends of their names, and how their gradients are computed."""
        keep(self, given, "tp_group parallel_mode fuse_wgrad_accumulation return_bias ub_name in_features out_features")
        self.tp_size = given.tp_size if given.tp_group is None else size_of(given.tp_group)
        self.sequence_parallel = self.tp_size > 1 and given.sequence_parallel
        self.use_bias, self.apply_bias = given.bias, given.bias and not given.return_bias
        self.wgrad_store, self._suffixes = WeightGradStore(given.delay_wgrad_compute), suffixes
        if given.parallel_mode == "column":
            self.out_features //= self.tp_size
        elif given.parallel_mode == "row":
            self.in_features //= self.tp_size
        options: Any = {"dtype": given.params_dtype or torch.get_default_dtype(), "device": given.device}
        region = getattr(given, "rng_tracker_name", None) or getattr(self, "rng_tracker_name", None)
        self.rng_tracker_name = region
        for end in suffixes:
            weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features, **options))
            self.register_parameter(f"weight{end}", weight)
            self._mark(weight, is_shared=True)
            init, tracker = (
                given.init_method or functools.partial(torch.nn.init.normal_, std=0.023),
                contextlib.nullcontext,
            )
            if given.get_rng_state_tracker is not None:
                tracker = functools.partial(given.get_rng_state_tracker().fork, *filter(None, [region]))
            if not weight.is_meta:
                with torch.no_grad(), tracker():
                    init(weight)
            if given.bias:
                bias = torch.nn.Parameter(torch.zeros(self.out_features, **options))
                self.register_parameter(f"bias{end}", bias)
                self._mark(bias, is_shared=self.parallel_mode == "column")
            else:
                setattr(self, f"bias{end}", torch.empty(0, **options))

    def _mark(self, param: Any, is_shared: bool) -> None:
        """Mark how ranks share a parameter, and whether its gradient is delayed."""
        if is_shared:
            param.tensor_model_parallel, param.partition_stride = True, 1
            param.partition_dim = int(self.parallel_mode == "row")
        elif self.parallel_mode == "row":
            param.sequence_parallel = self.sequence_parallel
        if self.wgrad_store.delay_wgrad_compute():
            param.skip_backward_post_hook = True

    def _pairs(self) -> list[tuple[Any, Any]]:
        """Weights with their biases, in the order of gradients."""
        return [(getattr(self, f"weight{end}"), getattr(self, f"bias{end}")) for end in self._suffixes]

    def _gradients(
        self, weight: Any, bias: Any, inputs: torch.Tensor, grad: torch.Tensor, is_first: bool | None
    ) -> tuple[Any, Any]:
        """Gradients of a weight and bias; `main_grad` takes the former where gradients accumulate.

        Those of a first micro-batch replace what it holds.
        """
        inputs, grad = inputs.flatten(0, -2), grad.flatten(0, -2)
        bias_grad = grad.sum(0) if bias is not None and bias.requires_grad else None
        if not weight.requires_grad:
            return None, bias_grad
        if not self.fuse_wgrad_accumulation:
            return grad.t() @ inputs, bias_grad
        if is_first:
            weight.main_grad.zero_()
        weight.main_grad.add_((grad.t().float() @ inputs.float()).to(weight.main_grad.dtype))
        return None, bias_grad

    def _placeholder(self, weight: Any) -> torch.Tensor | None:
        """What autograd is given where `main_grad` takes the gradient, now or later."""
        if not (self.fuse_wgrad_accumulation and hasattr(weight, "grad_added_to_main_grad")):
            return None
        weight.grad_added_to_main_grad = True
        return get_dummy_wgrad(list(weight.shape), weight.dtype, zero=getattr(weight, "zero_out_wgrad", False))

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """No scales without fp8."""

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """The group whose ranks share the weight."""
        self.tp_group = tp_group

    def register_wgrad_accumulation_and_reduce_hooks(self, wgrad_accumulation_and_reduce_hook: Any) -> None:
        """Called after delayed gradients are there."""
        self.wgrad_accumulation_and_reduce_hooks.append(wgrad_accumulation_and_reduce_hook)

    def need_backward_dw(self) -> bool:
        """Whether gradients are delayed."""
        return self.wgrad_store.delay_wgrad_compute()

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Compute delayed gradients."""
        if not self.need_backward_dw():
            return
        grads, _ = self.wgrad_store.pop()
        for (weight, bias), (weight_grad, bias_grad) in zip(self._pairs(), grads, strict=True):
            if not self.fuse_wgrad_accumulation:
                weight.grad = weight_grad
            if bias_grad is not None and bias.grad is None:
                bias.grad = bias_grad
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()
