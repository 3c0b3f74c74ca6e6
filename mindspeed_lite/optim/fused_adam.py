"""Fused step for torch's Adam and AdamW and for FusedAdam of Transformer Engine and Apex.

Groups, state and checkpoints stay as the replaced class has them.

`split_params`, `quantized_moments` and `placement` change the storage; inside `materialized()` all is fp32 on the
device.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from mindspeed_lite.ops import traced
from mindspeed_lite.ops.adamw import adamw
from mindspeed_lite.optim.quantized_moments import QuantizedMoments
from mindspeed_lite.optim.split_params import SplitFP32Params

_NOTHING: Mapping[torch.Tensor, Any] = MappingProxyType({})
_UNSUPPORTED = ("amsgrad", "maximize", "capturable", "differentiable", "fused")
# Attributes of FusedAdam with which gradients or main parameters are elsewhere.
_UNSUPPORTED_ATTRIBUTES = ("capturable", "master_weights", "use_decoupled_grad")


StateOf = Callable[[torch.Tensor], dict[str, Any]]


class StatePlacement(Protocol):
    """Where optimizer state is stored: `HostMappedMoments` or `SwappedOptimizerState`."""

    # : False if tensors are readable only in a step and inside `materialized`.
    device_addressable: bool

    def place(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Moves the parameter's moments to their place, before a step."""
        ...

    def update_groups(self, parameters: Sequence[torch.Tensor]) -> Iterator[slice]:
        """Yields parameters in parts, each updated when the next is requested."""
        ...

    def fetch(self, parameters: Iterable[torch.Tensor], state_of: StateOf) -> None:
        """Makes parameters and state readable, writable and replaceable on the device."""
        ...

    def offload(self, parameters: Iterable[torch.Tensor], state_of: StateOf) -> None:
        """Move the state back after `fetch`."""
        ...

    def restore(self) -> None:
        """Moves everything to the device, permanently."""
        ...


@dataclass(frozen=True)
class StepData:
    """Input and outcome of the next step.

    grad_scales: parameter -> gradient factor, e.g. a clip coefficient.
    cast_targets: parameter -> tensor for its new values, e.g. the bf16 weight.
    casts_done: the last step wrote the model's weights.
    """

    grad_scales: Mapping[torch.Tensor, float | torch.Tensor] = field(default_factory=lambda: _NOTHING)
    cast_targets: Mapping[torch.Tensor, torch.Tensor] = field(default_factory=lambda: _NOTHING)
    casts_done: bool = False


class _Row(NamedTuple):
    """Tensors of one update; first, low_or_cast: parameter and cast target, or high and low halves."""

    first: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    low_or_cast: torch.Tensor | None
    blocks: tuple[torch.Tensor, torch.Tensor] | None
    parameter: torch.Tensor


class FusedStep(torch.optim.Optimizer):
    # Class attributes: pickled or adopted optimizers skip __init__.
    step_data: StepData = StepData()
    split_params: SplitFP32Params | None = None
    quantized_moments: QuantizedMoments | None = None
    placement: StatePlacement | None = None
    decoupled: bool
    # : The class that `release` restores.
    replaced: ClassVar[type[torch.optim.Optimizer]]
    # : Whether a group counts steps, instead of each parameter.
    counts_by_group: ClassVar[bool] = False
    # : Parameters of open `materialized` contexts, and their number.
    _opened: tuple[torch.Tensor, ...] = ()
    _depth: int = 0
    # : Called with the reasons if the replaced class's own step runs.
    on_fallback: Callable[[list[str]], None] | None = None
    # : Called with this optimizer, the group and `adamw`'s arguments.
    before_update: Callable[..., None] | None = None

    @torch.optim.Optimizer.profile_hook_step
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step; the replaced class's own if there are `reasons`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        data, self.step_data = self.step_data, StepData()
        reasons = self.reasons()
        if reasons:
            if self.on_fallback is not None:
                self.on_fallback(reasons)
            scale_gradients(data.grad_scales)
            with self.materialized():
                # Methods of the replaced class may have names of ours.
                ours, replaced = type(self), self.replaced
                self.__class__ = replaced  # type: ignore[assignment]
                try:
                    # The profiler's hooks already surround this call.
                    inspect.unwrap(replaced.step)(self)
                finally:
                    self.__class__ = ours
            return loss
        halves = {} if self.split_params is None else self.split_params.halves()
        left = data.cast_targets.keys() - self._update(data, halves) - halves.keys()
        if left:
            with self.materialized(left):
                for parameter in left:
                    target = data.cast_targets[parameter]
                    target.copy_(parameter.view_as(target))
        self.step_data = StepData(casts_done=bool(data.cast_targets or halves))
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # by the decorator; torch asks when the class is instantiated

    @contextlib.contextmanager
    def materialized(self, parameters: Iterable[torch.Tensor] | None = None, converts: bool = True) -> Iterator[None]:
        """Context with fp32, writable parameters (default: all) and moments; the outermost one ends it for all.

        converts: False for values in their storage's form.
        """
        if parameters is None:
            parameters = [each for group in self.param_groups for each in group["params"]]
        opened = list(parameters)
        self._opened, self._depth = (*self._opened, *opened), self._depth + 1
        try:
            if self.placement is not None:
                self.placement.fetch(opened, self._state_of)
            for form in (self.quantized_moments, self.split_params) if converts else ():
                if form is not None:
                    form.widen(opened)
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                opened, self._opened = list(dict.fromkeys(self._opened)), ()
                for form in (self.split_params, self.quantized_moments):
                    if form is not None:
                        form.narrow(opened)
                if self.placement is not None:
                    self.placement.offload(opened, self._state_of)

    def fp32_copy(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """fp32 copies (`param`, `exp_avg`, `exp_avg_sq`) of tensors stored in another form."""
        if self.placement is None or self.placement.device_addressable:
            return self._converted(parameter)
        with self.materialized([parameter], converts=False):
            state = self.state.get(parameter, {})
            found = {"param": parameter, **{name: state[name] for name in ("exp_avg", "exp_avg_sq") if name in state}}
            found |= self._converted(parameter)
            return {name: each.detach().to("cpu", copy=True) for name, each in found.items()}

    def _converted(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        found = {} if self.quantized_moments is None else self.quantized_moments.fp32_copy(parameter)
        if self.split_params is not None:
            found |= self.split_params.joined(parameter, found.get("exp_avg_sq"))
        return found

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        found: dict[str, Any] = self.state.get(parameter, {})
        return found

    def pack(self) -> None:
        """Bring existing state to its form and place."""
        if self.quantized_moments is not None:
            self.quantized_moments.narrow([*self.state])
        if self.placement is not None:
            self.placement.offload([*self.state], self._state_of)

    def restore(self) -> None:
        """Convert everything to fp32 on the device, and forget form and place."""
        for form in (self.placement, self.quantized_moments, self.split_params):
            if form is not None:
                form.restore()
        for name in ("placement", "quantized_moments", "split_params"):
            vars(self).pop(name, None)

    def reasons(self) -> list[str]:
        found = [f"{name} is set" for name in _UNSUPPORTED_ATTRIBUTES if getattr(self, name, False)]
        for group in self.param_groups:
            found += [f"{name} is set" for name in _UNSUPPORTED if group.get(name)]
            found += [] if group.get("bias_correction", True) else ["bias_correction is not set"]
            if isinstance(group["lr"], torch.Tensor) or any(isinstance(beta, torch.Tensor) for beta in group["betas"]):
                found.append("the learning rate or a beta is a tensor")
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                is_plain = type(parameter) in (torch.Tensor, torch.nn.Parameter) and type(grad) is torch.Tensor
                if not is_plain and not traced.dry:
                    found.append(f"a parameter is a {type(parameter).__name__} with a {type(grad).__name__}")
                elif parameter.dtype != torch.float32 or grad.layout != torch.strided:
                    found.append(f"a parameter is {parameter.dtype}, its gradient {grad.layout}")
        return list(dict.fromkeys(found))

    def _update(
        self, data: StepData, halves: Mapping[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]
    ) -> set[torch.Tensor]:
        """Updates parameters with a gradient, one call per rule; returns them."""
        updated: set[torch.Tensor] = set()
        seen_steps: set[int] = set()
        for group in self.param_groups:
            if self.counts_by_group:
                group["step"] = group.get("step", 0) + 1
            batches: dict[Any, list[_Row]] = {}
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                updated.add(parameter)
                state = self._initialized(parameter, parameter in halves)
                if not self.counts_by_group:
                    if id(state["step"]) in seen_steps:
                        # Out of place: a loader may share one step tensor, which would count repeatedly.
                        state["step"] = state["step"] - 1
                    seen_steps.add(id(state["step"]))
                    state["step"] += 1
                blocks = None if self.quantized_moments is None else self.quantized_moments.blocks(parameter)
                if self.placement is not None and not self._depth:
                    self.placement.place(parameter, state)
                first, last = halves.get(parameter, (parameter, data.cast_targets.get(parameter)))
                row = _Row(first, grad, state["exp_avg"], state["exp_avg_sq"], last, blocks, parameter)
                dtypes = grad.dtype, None if last is None else last.dtype, row.exp_avg.dtype
                step = group["step"] if self.counts_by_group else state["step"]
                key = parameter.device, dtypes, float(step), data.grad_scales.get(parameter)
                batches.setdefault(key, []).append(row)
            for (_, (_, last_dtype, moment_dtype), step, scale), rows in batches.items():
                *lists, lasts, pairs, parameters = (list(each) for each in zip(*rows, strict=True))
                rule = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
                rule |= {"step": step, "grad_scale": scale, "decoupled": self.decoupled}
                more: dict[str, list[Any]] = {}
                if last_dtype is not None:
                    more["lows" if last_dtype == torch.int16 else "outs"] = lasts
                if moment_dtype == torch.uint8:
                    more["blocks"] = pairs
                for part in [slice(None)] if self.placement is None else self.placement.update_groups(parameters):
                    if self.before_update is not None:
                        self.before_update(self, group, *self._fp32_lists(parameters[part]), **rule)
                    rest: Any = {**rule, **{name: each[part] for name, each in more.items()}}
                    adamw(*(each[part] for each in lists), **rest)
        return updated

    def _initialized(self, parameter: torch.Tensor, is_split: bool) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            if not self.counts_by_group:
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
            if self.quantized_moments is not None:
                self.quantized_moments.zeros(parameter)
            else:
                layout = torch.contiguous_format if is_split else torch.preserve_format
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=layout)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=layout)
        return state

    def _fp32_lists(self, parameters: list[torch.Tensor]) -> tuple[list[torch.Tensor], ...]:
        lists: tuple[list[torch.Tensor], ...] = ([], [], [], [])
        for parameter in parameters:
            assert parameter.grad is not None
            found = {"param": parameter, **self.state[parameter], **self._converted(parameter)}
            row = (found["param"], parameter.grad, found["exp_avg"], found["exp_avg_sq"].abs())
            for each, tensor in zip(lists, row, strict=True):
                each.append(tensor)
        return lists


class FusedAdamW(FusedStep, torch.optim.AdamW):
    decoupled = True
    replaced = torch.optim.AdamW


class FusedAdam(FusedStep, torch.optim.Adam):
    decoupled = False
    replaced = torch.optim.Adam


def _fused_class(optimizer: torch.optim.Optimizer) -> type[FusedStep] | None:
    for ours in (FusedAdamW, FusedAdam):
        if type(optimizer) is ours.replaced:
            return ours
    theirs: Any = type(optimizer)
    if theirs.__name__ != "FusedAdam" or theirs.__module__.partition(".")[0] not in ("transformer_engine", "apex"):
        return None
    return _fused_class_of(theirs, bool(getattr(optimizer, "adam_w_mode", True)))


@functools.cache
def _fused_class_of(theirs: Any, decoupled: bool) -> type[FusedStep]:
    members = {"decoupled": decoupled, "replaced": theirs, "counts_by_group": True, "__module__": __name__}
    return type("FusedAdamW" if decoupled else "FusedAdam", (FusedStep, theirs), members)


def adopt(optimizer: torch.optim.Optimizer) -> FusedStep | None:
    """Converts torch's Adam or AdamW, or a FusedAdam, in place; None for others."""
    fused = _fused_class(optimizer)
    if fused is None:
        return None
    # Swap the class in place: existing references and isinstance checks keep working.
    optimizer.__class__ = fused
    return optimizer  # type: ignore[return-value]


def release(optimizer: torch.optim.Optimizer | None) -> None:
    """Restores an adopted optimizer's state and its own step."""
    if not isinstance(optimizer, FusedStep):
        return
    optimizer.restore()
    # Of a prepared step that did not run.
    scale_gradients(optimizer.step_data.grad_scales)
    for name in FusedStep.__annotations__:
        vars(optimizer).pop(name, None)
    optimizer.__class__ = optimizer.replaced  # type: ignore[assignment]
    # Loading a state recorded our class name for the profiler.
    optimizer._patch_step_function()  # type: ignore[attr-defined]


def scale_gradients(scales: Mapping[torch.Tensor, float | torch.Tensor]) -> None:
    by_factor: dict[float | torch.Tensor, list[torch.Tensor]] = {}
    for parameter, factor in scales.items():
        if parameter.grad is not None:
            by_factor.setdefault(factor, []).append(parameter.grad)
    for factor, grads in by_factor.items():
        torch._foreach_mul_(grads, factor)
