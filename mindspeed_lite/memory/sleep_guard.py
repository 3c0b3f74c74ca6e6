"""Lets each use of a sleeping model fail with one line; reading an empty storage ends the process."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

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
