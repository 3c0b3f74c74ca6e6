"""Lets each use of a sleeping model raise: reading an empty storage would end the process."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_lite.memory.storages import GRADIENTS, OPTIMIZER, PARTS, WEIGHTS, optimizers

# What a method needs awake.
_MODEL_METHODS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("zero_grad_buffer", "start_grad_sync", "finish_grad_sync", "scale_gradients"), (GRADIENTS,)),
    **dict.fromkeys(("start_param_sync", "broadcast_params"), (WEIGHTS,)),
}
_OPTIMIZER_METHODS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("step", "prepare_grads", "step_with_ready_grads"), PARTS),
    **dict.fromkeys(("state_dict", "sharded_state_dict", "load_state_dict"), (WEIGHTS, OPTIMIZER)),
    **dict.fromkeys(("reload_model_params", "save_parameter_state", "load_parameter_state"), (WEIGHTS, OPTIMIZER)),
}
# What a sleeping parameter can still do: no element is read, and no view made.
_METADATA = {
    *("size", "dim", "stride", "numel", "nelement", "element_size", "storage_offset", "untyped_storage", "data_ptr"),
    *("is_contiguous", "is_floating_point", "is_complex", "get_device", "__len__", "requires_grad_", "register_hook"),
    "register_post_accumulate_grad_hook",
}
_VIEWS = {"data", "T", "mT", "H", "mH", "real", "imag"}
_ABSENT = object()
Check = Callable[[str, Iterable[str]], object]


class SleepGuard:
    """Calls `check(call, parts)` before each call that needs these parts, until `remove`."""

    def __init__(self, chunks: Sequence[Any], optimizer: Any, check: Check) -> None:
        self._check = check
        self._undo: list[Callable[[], object]] = []
        self._trained = any(each.requires_grad for chunk in chunks for each in chunk.parameters())
        for module in {id(each): each for chunk in chunks for each in chunk.modules()}.values():
            handles = (
                module.register_forward_pre_hook(self._before_forward),
                module.register_state_dict_pre_hook(lambda *_: check("state_dict", (WEIGHTS,))),
                module._register_load_state_dict_pre_hook(lambda *_: check("load_state_dict", (WEIGHTS,))),
            )
            self._undo += [handle.remove for handle in handles]
        owners = [*((chunk, _MODEL_METHODS) for chunk in chunks)]
        owners += [(each, _OPTIMIZER_METHODS) for each in optimizers(optimizer)]
        for owner, methods in owners:
            for name, parts in methods.items():
                if hasattr(owner, name):
                    self._undo.append(_override(owner, name, functools.partial(check, name, parts)))

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _before_forward(self, module: torch.nn.Module, *_: Any) -> None:
        trains = self._trained and module.training and torch.is_grad_enabled()
        self._check(f"forward pass of {type(module).__name__}", (WEIGHTS, GRADIENTS) if trains else (WEIGHTS,))


def unreadable(chunks: Sequence[Any], check: Check) -> Callable[[], None]:
    """Let PyTorch's operators on parameters and buffers call `check` first; return the undo.

    Not covered: views made before, tensor subclasses, and kernels that take addresses.
    """
    changed: list[tuple[weakref.ref[Tensor], type]] = []
    kinds = {kind: _checked_kind(kind, check) for kind in (Tensor, torch.nn.Parameter)}
    for chunk in chunks:
        # Megatron's DDP has an attribute `buffers`.
        for each in (*chunk.parameters(), *torch.nn.Module.buffers(chunk)):
            kind = type(each)
            if kind in kinds:
                changed.append((weakref.ref(each), kind))
                each.__class__ = kinds[kind]

    def undo() -> None:
        for reference, kind in changed:
            found = reference()
            if found is not None:
                found.__class__ = kind

    return undo


def _checked_kind(kind: type, check: Check) -> type:
    def function(cls: type, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        name = func.__name__
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name in ("__get__", "__set__") else ""
        if attribute in _VIEWS or not (attribute or name in _METADATA):
            check(f"{attribute or name} of a parameter", (WEIGHTS,))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    return type(kind.__name__, (kind,), {"__torch_function__": classmethod(function), "__module__": kind.__module__})


def _override(owner: Any, name: str, check: Callable[[], object]) -> Callable[[], None]:
    """Let a method call `check` first; return the undo."""
    method, before, reference = getattr(owner, name), vars(owner).get(name, _ABSENT), weakref.ref(owner)

    @functools.wraps(method)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check()
        return method(*args, **kwargs)

    def undo() -> None:
        found = reference()
        if found is not None and vars(found).get(name) is checked:
            del vars(found)[name]
            vars(found).update({} if before is _ABSENT else {name: before})

    vars(owner)[name] = checked
    return undo
