"""Adam, SGD, and operations on lists of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..recorded import keep, recorded


class FusedAdam(torch.optim.Optimizer):
    """Adam, with a step count for each group."""

    @recorded
    def __init__(self, given: Any) -> None:
        narrow = {given.exp_avg_dtype, given.exp_avg_sq_dtype, given.master_weight_dtype} - {
            torch.float32,
            torch.bfloat16,
        }
        if given.amsgrad or given.capturable or narrow:
            raise RuntimeError("Transformer Engine's stand-in has neither AMSGrad, graphs nor scaled states")
        rule = ("lr", "bias_correction", "betas", "eps", "weight_decay")
        super().__init__(given.params, {name: getattr(given, name) for name in rule})
        self.adam_w_mode = 1 if given.adam_w_mode else 0
        keep(self, given, "capturable master_weights master_weight_dtype exp_avg_dtype exp_avg_sq_dtype")
        self.use_decoupled_grad = given.use_decoupled_grad
        self.store_param_remainders = given.store_param_remainders and given.master_weights

    def zero_grad(self, set_to_none: bool | None = None) -> None:  # type: ignore[override]
        """Drop gradients, or set them to zero."""
        if not self.use_decoupled_grad:
            return super().zero_grad(set_to_none=set_to_none is not False)
        for group in self.param_groups:
            for param in group["params"]:
                if set_to_none is not False:
                    param.decoupled_grad = None
                else:
                    param.decoupled_grad.zero_()
        return None

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        """States of a parameter that has none."""
        state = self.state[param]
        state["exp_avg"] = torch.zeros_like(param, dtype=self.exp_avg_dtype)
        state["exp_avg_sq"] = torch.zeros_like(param, dtype=self.exp_avg_sq_dtype)
        if self.master_weights:
            is_remainder = store_param_remainders and param.dtype == torch.bfloat16
            state["master_param"] = (
                torch.zeros_like(param, dtype=torch.int16) if is_remainder else param.detach().clone().float()
            )

    def get_unscaled_state(self, param: torch.Tensor, state_name: str, skip_unscale: bool = False) -> torch.Tensor:
        """A state; narrow ones have no scale here."""
        value: torch.Tensor = self.state[param][state_name]
        return value

    def set_scaled_state(self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor) -> None:
        """Set a state from its fp32 values."""
        if not self.state[param]:
            is_remainder = self.store_param_remainders and param.dtype == torch.bfloat16
            self.initialize_state(param, is_remainder)
        self.state[param][state_name].copy_(unscaled_state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:  # type: ignore[override]
        """One step of all groups."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                grad = param.decoupled_grad if self.use_decoupled_grad else param.grad
                if grad is not None:
                    self._update(param, grad.float(), group)
        return loss

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        is_remainder = self.store_param_remainders and param.dtype == torch.bfloat16
        if not self.state[param]:
            self.initialize_state(param, is_remainder)
        state = self.state[param]
        if is_remainder:
            # The low half is signed: the bf16 half was rounded up where it is negative.
            low = state["master_param"].int()
            main = ((param.view(torch.int16).int() << 16) + low).view(torch.float32)
        else:
            main = state.get("master_param", param).float()
        beta1, beta2 = group["betas"]
        if not self.adam_w_mode:
            grad = grad + group["weight_decay"] * main
        mean = state["exp_avg"].float().mul(beta1).add(grad, alpha=1 - beta1)
        square = state["exp_avg_sq"].float().mul(beta2).addcmul(grad, grad, value=1 - beta2)
        state["exp_avg"].copy_(mean)
        state["exp_avg_sq"].copy_(square)
        corrections = [1 - beta ** group["step"] if group["bias_correction"] else 1.0 for beta in (beta1, beta2)]
        update = (mean / corrections[0]) / ((square / corrections[1]).sqrt() + group["eps"])
        if self.adam_w_mode:
            update = update + group["weight_decay"] * main
        main = main - group["lr"] * update
        if is_remainder:
            bits = main.view(torch.int32)
            low = bits.to(torch.int16)
            state["master_param"].copy_(low)
            param.view(torch.int16).copy_(((bits - low.int()) >> 16).to(torch.int16))
            return
        if "master_param" in state:
            state["master_param"].copy_(main)
        param.copy_(main)


class FusedSGD(torch.optim.SGD):
    """SGD with momentum."""

    @recorded
    def __init__(self, given: Any) -> None:
        super().__init__(given.params, given.lr, given.momentum, given.dampening, given.weight_decay, given.nesterov)


class MultiTensorApply:
    """Calls an operation on lists of tensors."""

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: torch.Tensor, tensor_lists: Any, *args: Any) -> Any:
        """Call `op`, without tensors that have no element."""
        if any(len(tensors) != len(tensor_lists[0]) for tensors in tensor_lists):
            raise RuntimeError("Expected aligned multi-tensor lists.")
        filled = [index for index, tensor in enumerate(tensor_lists[0]) if tensor.numel()]
        if filled:
            lists = [[tensors[index] for index in filled] for tensors in tensor_lists]
            return op(self.chunk_size, noop_flag_buffer, lists, *args)
        return None


multi_tensor_applier = MultiTensorApply(2048 * 32)


def multi_tensor_scale(chunk: int, is_overflow: torch.Tensor, lists: list[list[torch.Tensor]], scale: float) -> None:
    """Second list = first * scale; reports values that are not finite."""
    for source, target in zip(*lists, strict=True):
        if not source.isfinite().all():
            is_overflow.fill_(1)
        target.copy_(source * scale)


def multi_tensor_scale_tensor(
    chunk: int, is_overflow: torch.Tensor, lists: list[list[torch.Tensor]], scale: torch.Tensor
) -> None:
    """`multi_tensor_scale` with a scale on the device, in fp32."""
    if scale.dtype != torch.float32:
        raise RuntimeError(f"Invalid type: {scale.dtype}")
    multi_tensor_scale(chunk, is_overflow, lists, float(scale))


def multi_tensor_l2norm(
    chunk: int, is_overflow: torch.Tensor, lists: list[list[torch.Tensor]], per_tensor: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm of all tensors, and of each."""
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]])
    return norms.norm()[None], norms if per_tensor else norms.new_empty(0)
