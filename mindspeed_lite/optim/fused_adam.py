"""Gives torch's Adam and AdamW the fused step of `adamw`: same groups, same state, same checkpoints.

`adopt` turns an optimizer that exists into one of these. `next_step` is what the code around a step hands it, so that
it need not be a pass of its own over all parameters; the step uses it up. `cast_done` says afterwards whether all of
its `cast_targets` have been written.

Three say in what form the values are stored and where, and stay. Inside `materialized()` all are fp32 on the device;
`fp32_copy` returns copies:

split_params          which parameters are stored as bf16 weight and low half
quantized_moments     which moments have fewer bits than fp32
placement             where moments are stored, and maybe parameters
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch

from mindspeed_lite.ops.adamw import adamw
from mindspeed_lite.optim.quantized_moments import QuantizedMoments
from mindspeed_lite.optim.split_params import SplitFP32Params

_NOTHING: Mapping[torch.Tensor, Any] = MappingProxyType({})
_UNSUPPORTED = ("amsgrad", "maximize", "capturable", "differentiable", "fused")


class StatePlacement(Protocol):
    """Where optimizer state, and maybe parameters, are stored: `HostMappedMoments` or `SwappedOptimizerState`."""

    #: Whether the device can read the tensors at all times; if not, only in a step and inside `materialized`.
    device_addressable: bool

    def place(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Before a step: store the moments of the parameter in their place, unless they are there."""
        ...

    def update_groups(self, parameters: Sequence[torch.Tensor]) -> Iterator[slice]:
        """The parameters in parts, one after the other; each has been updated when the next is asked for."""
        ...

    def materialized(
        self, parameters: Iterable[torch.Tensor], state_of: Callable[[torch.Tensor], dict[str, Any]]
    ) -> contextlib.AbstractContextManager[None]:
        """Inside, parameters and what their state has may be read, written and replaced; not from a step."""
        ...

    def restore(self) -> None:
        """Bring all back."""
        ...


@dataclass(frozen=True)
class StepInput:
    """What one step takes beside gradients and state.

    Attributes:
        grad_scales: parameter -> factor of its gradient, such as a clip coefficient.
        cast_targets: parameter -> tensor that gets the new values, such as the bf16 weight of an fp32 main parameter.
    """

    grad_scales: Mapping[torch.Tensor, float] = field(default_factory=lambda: _NOTHING)
    cast_targets: Mapping[torch.Tensor, torch.Tensor] = field(default_factory=lambda: _NOTHING)


class _Fused(torch.optim.Optimizer):
    """The step; everything else is the class of torch that stands behind this one."""

    # Of the class, since a pickled optimizer and an adopted one come without a call of __init__.
    next_step: StepInput = StepInput()
    cast_done: bool = False
    split_params: SplitFP32Params | None = None
    quantized_moments: QuantizedMoments | None = None
    placement: StatePlacement | None = None
    decoupled: bool
    #: Called with the reasons when a step is torch's own.
    on_fallback: Callable[[list[str]], None] | None = None
    #: Called with this optimizer, the group and the arguments of `adamw` before it is.
    before_update: Callable[..., None] | None = None

    @torch.optim.Optimizer.profile_hook_step
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step, or torch's own where `reasons` has any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given, self.next_step = self.next_step, StepInput()
        scales, cast_targets = given.grad_scales, given.cast_targets
        self.cast_done = False
        reasons = self.reasons()
        if reasons:
            if self.on_fallback is not None:
                self.on_fallback(reasons)
            scale_gradients(scales)
            with self.materialized():
                # Without the profiler's hooks, which are around this call already.
                inspect.unwrap(super().step.__func__)(self)  # type: ignore[attr-defined]
            return loss
        in_halves = {} if self.split_params is None else self.split_params.halves()
        updated = self._update(scales, cast_targets, in_halves)
        left = cast_targets.keys() - updated - in_halves.keys()
        if left:
            with self.materialized(left):
                for parameter in left:
                    cast_targets[parameter].copy_(parameter.view_as(cast_targets[parameter]))
        self.cast_done = bool(cast_targets or in_halves)
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # by the decorator; torch asks when the class is instantiated

    @contextlib.contextmanager
    def materialized(self, parameters: Iterable[torch.Tensor] | None = None) -> Iterator[None]:
        """Inside, parameters (all, if not given) and their moments are fp32 and may be read, written and replaced."""
        some = None if parameters is None else list(parameters)
        with contextlib.ExitStack() as stack:
            if self.placement is not None:
                every = [each for group in self.param_groups for each in group["params"]]
                stack.enter_context(self.placement.materialized(every if some is None else some, self._state_of))
            if self.quantized_moments is not None:
                stack.enter_context(self.quantized_moments.materialized(some))
            if self.split_params is not None:
                stack.enter_context(self.split_params.materialized(some))
            yield

    def fp32_copy(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """fp32 copies by name (`param`, `exp_avg`, `exp_avg_sq`) of what has no such form; empty if all has.

        Where the numbers are not on the device, these are copies of all, in host memory.
        """
        if self.placement is None or self.placement.device_addressable:
            return self._present(parameter)
        with self.placement.materialized([parameter], self._state_of):
            state = self.state.get(parameter, {})
            found = {"param": parameter, **{name: state[name] for name in ("exp_avg", "exp_avg_sq") if name in state}}
            found |= self._present(parameter)
            return {name: each.detach().to("cpu", copy=True) for name, each in found.items()}

    def _present(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """`fp32_copy`, of numbers that are on the device."""
        found = {} if self.quantized_moments is None else self.quantized_moments.fp32_copy(parameter)
        if self.split_params is not None:
            found |= self.split_params.joined(parameter, found.get("exp_avg_sq"))
        return found

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        found: dict[str, Any] = self.state.get(parameter, {})
        return found

    def restore(self) -> None:
        """Make all plain, in the device's own memory, for good."""
        if self.placement is not None:
            self.placement.restore()
        if self.quantized_moments is not None:
            self.quantized_moments.restore()
        if self.split_params is not None:
            self.split_params.restore()

    def reasons(self) -> list[str]:
        """Why the next step must be torch's own; empty if it need not."""
        found = []
        for group in self.param_groups:
            found += [f"{name} is set" for name in _UNSUPPORTED if group.get(name)]
            if isinstance(group["lr"], torch.Tensor) or any(isinstance(beta, torch.Tensor) for beta in group["betas"]):
                found.append("the learning rate or a beta is a tensor")
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                if type(parameter) not in (torch.Tensor, torch.nn.Parameter) or type(grad) is not torch.Tensor:
                    found.append(f"a parameter is a {type(parameter).__name__} with a {type(grad).__name__}")
                elif parameter.dtype != torch.float32 or grad.layout != torch.strided:
                    found.append(f"a parameter is {parameter.dtype}, its gradient {grad.layout}")
        return list(dict.fromkeys(found))

    def _update(
        self,
        scales: Mapping[torch.Tensor, float],
        cast_targets: Mapping[torch.Tensor, torch.Tensor],
        in_halves: Mapping[torch.Tensor, tuple[torch.Tensor, torch.Tensor]],
    ) -> set[torch.Tensor]:
        """Update every parameter that has a gradient, with as few calls as there are different rules."""
        updated: set[torch.Tensor] = set()
        seen_steps: set[int] = set()
        for group in self.param_groups:
            batches: dict[Any, tuple[list[Any], ...]] = {}
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                updated.add(parameter)
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0, dtype=torch.float32)
                    if self.quantized_moments is not None:
                        self.quantized_moments.zeros(parameter)
                    else:
                        layout = torch.contiguous_format if parameter in in_halves else torch.preserve_format
                        state["exp_avg"] = torch.zeros_like(parameter, memory_format=layout)
                        state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=layout)
                step = state["step"]
                if id(step) in seen_steps:
                    # A loader may give one tensor to all; a step would then count once for each of them.
                    step = state["step"] = step - 1
                seen_steps.add(id(step))
                step += 1
                exponents = None if self.quantized_moments is None else self.quantized_moments.blocks(parameter)
                if self.placement is not None:
                    self.placement.place(parameter, state)
                # The last is a copy to write, or a low half.
                first, last = in_halves.get(parameter, (parameter, cast_targets.get(parameter)))
                key = (
                    parameter.device,
                    grad.dtype,
                    None if last is None else last.dtype,
                    state["exp_avg"].dtype,
                    float(step),
                    scales.get(parameter),
                )
                batch = batches.setdefault(key, ([], [], [], [], [], [], []))
                row = (first, grad, state["exp_avg"], state["exp_avg_sq"], last, exponents, parameter)
                for each, tensor in zip(batch, row, strict=True):
                    each.append(tensor)
            for (_, _, last_dtype, moment_dtype, count, scale), (*lists, lasts, pairs, own) in batches.items():
                arguments = {
                    "lr": group["lr"],
                    "betas": group["betas"],
                    "eps": group["eps"],
                    "weight_decay": group["weight_decay"],
                    "step": count,
                    "grad_scale": scale,
                    "decoupled": self.decoupled,
                }
                lows = lasts if last_dtype == torch.int16 else None
                outs = None if last_dtype is None or lows is not None else lasts
                blocks = pairs if moment_dtype == torch.uint8 else None
                for part in [slice(None)] if self.placement is None else self.placement.update_groups(own):
                    if self.before_update is not None:
                        self.before_update(self, group, *self._fp32_lists(own[part]), **arguments)
                    adamw(
                        *(each[part] for each in lists),
                        **arguments,
                        outs=None if outs is None else outs[part],
                        lows=None if lows is None else lows[part],
                        blocks=None if blocks is None else blocks[part],
                    )
        return updated

    def _fp32_lists(self, parameters: list[torch.Tensor]) -> tuple[list[torch.Tensor], ...]:
        """The four lists of `adamw` in fp32, as copies where they stand in other forms."""
        lists: tuple[list[torch.Tensor], ...] = ([], [], [], [])
        for parameter in parameters:
            assert parameter.grad is not None
            found = {"param": parameter, **self.state[parameter], **self._present(parameter)}
            row = (found["param"], parameter.grad, found["exp_avg"], found["exp_avg_sq"].abs())
            for each, tensor in zip(lists, row, strict=True):
                each.append(tensor)
        return lists


class FusedAdamW(_Fused, torch.optim.AdamW):
    """`torch.optim.AdamW` with the fused step."""

    decoupled = True


class FusedAdam(_Fused, torch.optim.Adam):
    """`torch.optim.Adam` with the fused step."""

    decoupled = False


def adopt(optimizer: torch.optim.Optimizer) -> FusedAdamW | FusedAdam | None:
    """The same optimizer with the fused step, or None if it is not exactly torch's Adam or AdamW."""
    fused = {torch.optim.AdamW: FusedAdamW, torch.optim.Adam: FusedAdam}.get(type(optimizer))  # type: ignore[call-overload]
    if fused is None:
        return None
    # Swap the class in place: existing references and isinstance checks keep working.
    optimizer.__class__ = fused
    return optimizer  # type: ignore[return-value]


def release(optimizer: torch.optim.Optimizer | None) -> None:
    """Give an adopted optimizer torch's step back; its numbers are made plain first."""
    if not isinstance(optimizer, (FusedAdam, FusedAdamW)):
        return
    optimizer.restore()
    # Of a step that was prepared and did not come.
    scale_gradients(optimizer.next_step.grad_scales)
    for name in _Fused.__annotations__:
        vars(optimizer).pop(name, None)
    optimizer.__class__ = torch.optim.AdamW if isinstance(optimizer, FusedAdamW) else torch.optim.Adam  # type: ignore[assignment]
    # A state that was loaded meanwhile has left the class's name in what the profiler shows.
    optimizer._patch_step_function()  # type: ignore[attr-defined]


def scale_gradients(scales: Mapping[torch.Tensor, float]) -> None:
    """Multiply gradients in place, as the step would have done on the way."""
    by_factor: dict[float, list[torch.Tensor]] = {}
    for parameter, factor in scales.items():
        if parameter.grad is not None:
            by_factor.setdefault(factor, []).append(parameter.grad)
    for factor, grads in by_factor.items():
        torch._foreach_mul_(grads, factor)
