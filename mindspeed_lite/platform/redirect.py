"""Reversible attribute changes on torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from types import FrameType, ModuleType
from typing import Any

_ABSENT = object()

# Packages that see the real machine: they plan kernels, probe drivers or choose backends.
MACHINE_PACKAGES = frozenset(
    {"torch", "triton", "torchvision", "torchaudio", "torch_npu", "functorch", "mindspeed_lite"}
)

# Megatron 0.15 compiles an optional CUDA extension on import; without a GPU torch needs this or raises IndexError.
NO_CUDA_EXTENSION = ("TORCH_CUDA_ARCH_LIST", "8.0")


class Redirects:
    """Journal of attribute assignments, undone in reverse order."""

    def __init__(self) -> None:
        self._journal: list[tuple[Any, str, Any, Any]] = []
        self._environment: list[str] = []
        self._shared: set[int] = set()
        self._undos: list[Callable[[], None]] = []

    def default_environment(self, name: str, value: str) -> None:
        if name not in os.environ:
            os.environ[name] = value
            self._environment.append(name)

    def on_undo(self, undo: Callable[[], None]) -> None:
        self._undos.append(undo)

    def set(self, owner: Any, name: str, value: Any, *, shared: bool = False) -> None:
        """Set `owner.name` and record its previous value.

        shared: other modules may hold `value`, so undo leaves their references.
        """
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self._journal.append((owner, name, before, value))
        if shared:
            self._shared.add(id(value))

    def rebind_importers(self) -> None:
        """Rebind modules outside `MACHINE_PACKAGES` that imported an original by value."""
        new_by_old = {
            id(before): after for _, _, before, after in self._journal if before is not _ABSENT and callable(before)
        }
        for module, name, value in _held_by_modules(new_by_old):
            after = new_by_old[id(value)]
            if value is not after:
                self.set(module, name, after)

    def undo(self) -> None:
        """Restore everything, newest first, also in modules that have since imported a redirected name."""
        moved: dict[int, dict[str, Any]] = {}
        for _, name, before, after in reversed(self._journal):
            if before is not _ABSENT and callable(after) and id(after) not in self._shared:
                moved.setdefault(id(after), {})[name] = before
        while self._undos:
            self._undos.pop()()
        while self._environment:
            os.environ.pop(self._environment.pop(), None)
        while self._journal:
            owner, name, before, _ = self._journal.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        for module, name, value in _held_by_modules(moved):
            befores = moved[id(value)]
            # One replacement may have several names; then the importer's name decides.
            before = befores.get(name, next(iter(befores.values())) if len(befores) == 1 else _ABSENT)
            if before is not _ABSENT:
                setattr(module, name, before)


def _held_by_modules(identities: Mapping[int, Any]) -> list[tuple[ModuleType, str, Any]]:
    found: list[tuple[ModuleType, str, Any]] = []
    for module_name, module in list(sys.modules.items()):
        top = module_name.partition(".")[0]
        if top in MACHINE_PACKAGES or top in _QUIET or not isinstance(module, ModuleType):
            continue
        # Most modules hold none; this check runs no Python code of theirs.
        if not identities.keys().isdisjoint(map(id, list(vars(module).values()))):
            found += [(module, name, value) for name, value in list(vars(module).items()) if id(value) in identities]
    return found


_QUIET = (frozenset(sys.stdlib_module_names) | {"mpmath", "networkx", "numpy", "sympy"}) - {"__main__"}
_machine_module: dict[str, bool] = {}


def asked_by_machine(frame: FrameType) -> bool:
    """Whether `frame` is torch or a library other than Megatron; cached by module name."""
    name = frame.f_globals.get("__name__", "")
    known = _machine_module.get(name)
    if known is None:
        top = name.partition(".")[0]
        file = frame.f_code.co_filename
        known = top in MACHINE_PACKAGES or (
            top not in {"megatron", "__main__", "__mp_main__"}
            and ("site-packages" in file or "dist-packages" in file or top in _QUIET)
        )
        _machine_module[name] = known
    return known


def for_the_host(original: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    """Call `original` for torch and libraries, `answer` for Megatron and scripts."""

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (original if asked_by_machine(sys._getframe(1)) else answer)(*args, **kwargs)

    chosen.__name__ = getattr(original, "__name__", "chosen")
    chosen.__doc__ = original.__doc__
    return chosen
