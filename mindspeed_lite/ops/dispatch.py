"""Chooses the implementation of an operator call by the device of its tensors.

A *case* is a named tuple that describes a call; `Operator.choose` caches per case. A backend is `cpu.py`, `cuda.py` or
`npu.py` next to `reference.py`, imported at the first case of its device. It defines a function with the reference's
name, and, if it cannot serve every case,

    DTYPES                              those of `case.dtype`
    LIBRARY                             the C++ kernels that every case needs (`native.Library`)
    supported(case) -> list[str]        further reasons why it cannot serve the case

Refused cases run on the reference; each (operator, backend, reasons) is logged once.

`batch_dependence` of an operator says for the reference and each backend why a row's forward bits depend on the other
rows or on their number, "" if they do not; {} stands for an operator that has no rows or no forward pass. On CPU no
reference depends on them (`batch_invariant.py`): its entry is about devices. `require_batch_invariance` admits only
what is independent.

Backward passes use autograd.Function: torch.library.custom_op costs 86 us more per forward call, not 30 us (rms_norm
[8, 64], torch 2.11).
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mindspeed_lite.ops import batch_invariant, discovery
from mindspeed_lite.ops.discovery import OPERATORS
from mindspeed_lite.ops.traced import is_traced

__all__ = [
    "OPERATORS", "REFERENCE", "Case", "Implementation", "Operator", "Selection", "device_unusable", "force",
    "on_fallback", "operator", "report_fallback", "require_batch_invariance", "selected",
]  # fmt: skip

Implementation = Callable[..., Tensor]
FallbackCallback = Callable[[str, str, tuple[str, ...]], None]

REFERENCE = "reference"

_log = logging.getLogger("mindspeed_lite")
_lock = threading.RLock()
_reported: set[tuple[str, str, tuple[str, ...]]] = set()
_subscribers: list[FallbackCallback] = []


class Case(Protocol):
    """Common fields of all cases; hashable, compared by value."""

    @property
    def device(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __hash__(self) -> int: ...


class Selection(NamedTuple):
    """The backend for a device, and why a better one is unusable."""

    backend: str
    reasons: tuple[str, ...]


class Operator:
    """An operator: its reference and backend modules by device type (default: adjacent files)."""

    def __init__(
        self,
        name: str,
        reference: Implementation,
        backends: Mapping[str, str] | None = None,
        *,
        batch_dependence: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.reference = reference
        self.batch_dependence = batch_dependence
        self.backends = _adjacent_backends(reference) if backends is None else dict(backends)
        self._chosen: dict[Case, ModuleType | None] = {}
        self._forced: str | None = None

    def choose(self, case: Case, *tensors: Tensor | None) -> Implementation:
        """The implementation for a call.

        tensors: what CPU and CUDA kernels read by address. If torch.compile traces or they have no memory, the
        reference serves; torch_npu's operators trace like torch's.
        """
        module = self._backend(case, tensors)
        implementation: Implementation = self.reference if module is None else getattr(module, self.reference.__name__)
        is_restricted = batch_invariant.is_required() and self.batch_dependence != {}
        return batch_invariant.scoped(implementation) if is_restricted else implementation

    def module(self, case: Case, *tensors: Tensor | None) -> Any:
        """Module of the chosen backend or of the reference, for operators with several functions."""
        return self._backend(case, tensors) or sys.modules[self.reference.__module__]

    def why_not(self, case: Case) -> list[str]:
        """Reasons why the device's backend refuses the case; empty without a backend."""
        return self._reasons(self._forced or case.device, case)

    def unusable(self, backend: str) -> list[str]:
        """Why `backend` serves no case in this process."""
        if backend == REFERENCE:
            return []
        if backend not in self.backends:
            return [f"{self.name} has no backend of that name (it has {', '.join(sorted(self.backends))})"]
        reasons = device_unusable(backend) + self._batch_reasons(backend, backend)
        if not reasons and isinstance(module := self._module(backend), str):
            reasons.append(module)
        return reasons

    def _batch_reasons(self, backend: str, device: str) -> list[str]:
        """Why `backend` does not serve rows on `device` that must not depend on their batch, if that is required."""
        declared = self.batch_dependence
        if not batch_invariant.is_required() or declared == {} or (backend == REFERENCE and device == "cpu"):
            return []
        reason = (declared or {}).get(backend, "it does not declare whether a row's bits depend on its batch")
        return [f"--batch-invariant: {reason}"] if reason else []

    def _backend(self, case: Case, tensors: Sequence[Tensor | None]) -> ModuleType | None:
        if case.device != "npu" and any(each is not None and is_traced(each) for each in tensors):
            return None
        return self._chosen[case] if case in self._chosen else self._resolve(case)

    def _resolve(self, case: Case) -> ModuleType | None:
        backend = self._forced or case.device
        reasons = self._reasons(backend, case)
        if reasons and self._forced is not None:
            raise RuntimeError(f"{self.name}: {backend} is forced and cannot serve this call: {'; '.join(reasons)}")
        if reasons:
            # Before caching, so that the next call reports again if a subscriber raises (strict mode).
            report_fallback(self.name, backend, tuple(reasons))
        module = None if reasons else self._module(backend)
        if module is None and (without := self._batch_reasons(REFERENCE, case.device)):
            raise RuntimeError(f"{self.name} has no batch-invariant backend on {case.device}: {'; '.join(without)}")
        chosen = self._chosen[case] = module if isinstance(module, ModuleType) else None
        return chosen

    def _reasons(self, backend: str, case: Case) -> list[str]:
        module = self._module(backend)
        if not isinstance(module, ModuleType):
            return [] if module is None else [module]
        given, reasons = vars(module), self._batch_reasons(backend, case.device)
        if "DTYPES" in given and case.dtype not in module.DTYPES:
            taken = ", ".join(sorted(str(each).removeprefix("torch.") for each in module.DTYPES))
            reasons.append(f"dtype {case.dtype}: the {backend} backend takes {taken}")
        reasons += module.supported(case) if "supported" in given else []
        unusable = module.LIBRARY.unusable() if "LIBRARY" in given and not reasons else None
        return reasons if unusable is None else [unusable]

    def _module(self, backend: str) -> ModuleType | str | None:
        if backend not in self.backends:
            return None
        try:
            return importlib.import_module(self.backends[backend])
        except Exception as error:  # a vendor library may raise anything at import
            return f"{self.backends[backend]} failed to import: {type(error).__name__}: {error}"


def _adjacent_backends(reference: Implementation) -> dict[str, str]:
    module = sys.modules[reference.__module__]
    package, folder = module.__name__.rpartition(".")[0], Path(str(module.__file__)).parent
    return {device: f"{package}.{device}" for device in ("cpu", "cuda", "npu") if (folder / f"{device}.py").exists()}


def operator(name: str) -> Operator:
    found: Operator = importlib.import_module(discovery.package(name)).OPERATOR
    return found


def selected(op: str, device: str) -> Selection:
    """The backend for `device`, unless it refuses a case."""
    found = operator(op)
    if device not in found.backends:
        return Selection(REFERENCE, ())
    reasons = found.unusable(device)
    if reasons:
        return Selection(REFERENCE, tuple(f"{device}: {reason}" for reason in reasons))
    return Selection(device, ())


def device_unusable(device: str) -> list[str]:
    """Why this process has no such device; empty if it has."""
    if device == "cuda" and not torch.cuda.is_available():
        return ["no CUDA device"]
    if device == "npu":
        try:
            torch_npu: Any = importlib.import_module("torch_npu")
        except ModuleNotFoundError as error:
            if error.name == "torch_npu":
                return ["torch_npu is not installed"]
            return [f"torch_npu failed to import: {error}"]
        except Exception as error:  # a missing CANN library raises OSError, ImportError or RuntimeError
            return [f"torch_npu failed to import: {type(error).__name__}: {error}"]
        if not torch_npu.npu.is_available():
            return ["no NPU device"]
    return []


def on_fallback(callback: FallbackCallback) -> Callable[[], None]:
    """Calls `callback(op, backend, reasons)` at every new fallback; returns an unsubscribe function.

    Its exceptions reach the operator's caller, and the fallback then counts as unreported.
    """
    with _lock:
        _subscribers.append(callback)

    def unsubscribe() -> None:
        with _lock:
            if callback in _subscribers:
                _subscribers.remove(callback)

    return unsubscribe


@contextmanager
def force(op: str, backend: str) -> Iterator[None]:
    """Forces `op` to `backend` in the block, on all threads; RuntimeError for unsupported cases."""
    found = operator(op)
    reasons = found.unusable(backend)
    if reasons:
        raise RuntimeError(f"{op}: backend {backend!r} cannot be forced: {'; '.join(reasons)}")
    with _lock:
        before = found._forced
        found._forced = backend
        found._chosen.clear()
    try:
        yield
    finally:
        with _lock:
            found._forced = before
            found._chosen.clear()


def require_batch_invariance() -> Callable[[], None]:
    """Admits only implementations whose rows do not depend on their batch; returns the undo."""
    undo = batch_invariant.require()
    _forget_choices()

    def end() -> None:
        undo()
        _forget_choices()

    return end


def _forget_choices() -> None:
    for package in OPERATORS.values():
        if package in sys.modules:
            sys.modules[package].OPERATOR._chosen.clear()


def report_fallback(op: str, backend: str, reasons: tuple[str, ...], to: str = "the reference") -> None:
    """Logs a fallback once; further operators with the same reason at INFO."""
    fallback = (op, backend, reasons)
    with _lock:
        if fallback in _reported:
            return
        is_known = any(reasons == known for _, _, known in _reported)
        level = logging.INFO if is_known else logging.WARNING
        _log.log(level, "%s: %s falls back to %s: %s", op, backend, to, "; ".join(reasons))
        for callback in tuple(_subscribers):
            callback(op, backend, reasons)
        _reported.add(fallback)
