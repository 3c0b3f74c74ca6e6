"""Reversible attribute changes on torch: what the device layer needs in order to be taken back.

The patch engine swaps attributes of Megatron by declared features; this is the smaller tool below it, for torch
itself, where a device's meaning is defined before anything of Megatron is loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType, ModuleType
from typing import Any

_ABSENT = object()

# Packages that must go on seeing the machine as it is: torch plans kernels, pins memory and compiles by what it
# finds, the libraries around it probe for a driver, and this one chooses backends.
MACHINE_PACKAGES = frozenset(
    {"torch", "triton", "torchvision", "torchaudio", "torch_npu", "functorch", "mindspeed_lite"}
)

# Megatron 0.15 compiles a CUDA extension when it is imported, and lives without it. Where there is no GPU to ask, torch
# looks for its architecture here, and the import ends in an IndexError without it.
NO_CUDA_EXTENSION = ("TORCH_CUDA_ARCH_LIST", "8.0")


class Redirects:
    """A journal of attribute assignments that can be undone in reverse order."""

    def __init__(self) -> None:
        self._journal: list[tuple[Any, str, Any, Any]] = []
        self._environment: list[str] = []
        self._shared: set[int] = set()
        self._undos: list[Callable[[], None]] = []

    def default_environment(self, name: str, value: str) -> None:
        """Set an environment variable that the user has left unset."""
        if name not in os.environ:
            os.environ[name] = value
            self._environment.append(name)

    def on_undo(self, undo: Callable[[], None]) -> None:
        """Have `undo` called, once, with the rest: for what is no attribute."""
        self._undos.append(undo)

    def set(self, owner: Any, name: str, value: Any, *, shared: bool = False) -> None:
        """Set `owner.name` and remember what its own dictionary held before.

        `shared`: `value` has a life of its own elsewhere, so who holds it need not have it from here.
        """
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self._journal.append((owner, name, before, value))
        if shared:
            self._shared.add(id(value))

    def rebind_importers(self) -> None:
        """Give modules that imported a redirected name by value the redirected one.

        `from torch.cuda import _lazy_call as call` in a module loaded before the device layer keeps the original;
        modules of `MACHINE_PACKAGES` keep theirs on purpose.
        """
        new_by_old = {
            id(before): after for _, _, before, after in self._journal if before is not _ABSENT and callable(before)
        }
        for module, name, value in _held_by_modules(new_by_old):
            after = new_by_old[id(value)]
            if value is not after:
                self.set(module, name, after)

    def undo(self) -> None:
        """Put back everything, newest first; also in modules that imported a redirected name since."""
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
            # One replacement may stand for several names; then the importer's own name tells which.
            before = befores.get(name, next(iter(befores.values())) if len(befores) == 1 else _ABSENT)
            if before is not _ABSENT:
                setattr(module, name, before)

    def owners(self) -> Iterable[tuple[Any, str]]:
        """Every (owner, name) this journal has changed."""
        return [(owner, name) for owner, name, _, _ in self._journal]


def _held_by_modules(identities: Mapping[int, Any]) -> list[tuple[ModuleType, str, Any]]:
    """Where the modules that follow the device layer hold one of the objects, given by identity."""
    found: list[tuple[ModuleType, str, Any]] = []
    for module_name, module in list(sys.modules.items()):
        top = module_name.partition(".")[0]
        if top in MACHINE_PACKAGES or top in _QUIET or not isinstance(module, ModuleType):
            continue
        # Most modules hold none, and finding that out runs no Python code.
        if not identities.keys().isdisjoint(map(id, list(vars(module).values()))):
            found += [(module, name, value) for name, value in list(vars(module).items()) if id(value) in identities]
    return found


# Libraries that torch brings along, of thousands of modules' names, and that never ask for a device.
_QUIET = (frozenset(sys.stdlib_module_names) | {"mpmath", "networkx", "numpy", "sympy"}) - {"__main__"}
_machine_module: dict[str, bool] = {}


def asked_by_machine(frame: FrameType) -> bool:
    """Whether the code of `frame` belongs to torch or to an installed library other than Megatron.

    Such code must get the truth about the machine; Megatron and the user's own scripts get the device layer's
    answer. The decision is made once per module name.
    """
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
    """A function that gives `original` to torch's own callers and `answer` to everybody else."""

    def chosen(*args: Any, **kwargs: Any) -> Any:
        if asked_by_machine(sys._getframe(1)):
            return original(*args, **kwargs)
        return answer(*args, **kwargs)

    chosen.__name__ = getattr(original, "__name__", "chosen")
    chosen.__doc__ = getattr(original, "__doc__", None)
    return chosen
