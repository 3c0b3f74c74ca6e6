"""Chooses, for an operator call, the implementation that its tensors' device offers.

An operator package describes a call by a *case*: a named tuple of cheap metadata whose field `device` is the
tensors' device type. `Operator.choose(case)` returns an implementation and remembers it, so that a later call
of the same case costs one dictionary lookup. A backend module is imported when a case first names its device
(or when the table asks), and holds two functions: one with the operator's name and signature, and

    supported(case) -> list[str]        every reason why it cannot serve the case; empty means it can

What a backend cannot do goes to the reference, and each (operator, backend, reasons) is logged once: a WARNING
of the logger "mindspeed_lite", and a call of every subscriber of `on_fallback`.

Host cost in thread time, torch 2.11 on one x86 core, minimum over loops: choosing, with the checks of the
public function around it, takes 2.0 us for rms_norm and 4.0 us for attention. Registering a kernel of our own
with autograd costs more, and was measured both ways around the same rms_norm kernels on an [8, 64] tensor,
forward call: torch.autograd.Function adds 30 us with gradients (8 us if its forward does nothing) and 0
without, since it is then not entered; torch.library.custom_op adds 86 us with gradients and 26 us without.
Hence operators that bring their own backward use autograd.Function.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch

from mindspeed_lite.ops.discovery import OPERATORS

__all__ = [
    "OPERATORS", "REFERENCE", "Case", "Implementation", "Operator", "Selection", "backends", "device_unusable", "force",
    "on_fallback", "operator", "report_fallback", "selected",
]  # fmt: skip

Implementation = Callable[..., torch.Tensor]
FallbackCallback = Callable[[str, str, tuple[str, ...]], None]

REFERENCE = "reference"

_log = logging.getLogger("mindspeed_lite")
_lock = threading.RLock()
_reported: set[tuple[str, str, tuple[str, ...]]] = set()
_subscribers: list[FallbackCallback] = []


class Case(Protocol):
    """What every operator's case has in common; a case is hashable and compares by value."""

    @property
    def device(self) -> str: ...

    def __hash__(self) -> int: ...


class Selection(NamedTuple):
    """The backend that serves a device, and why a better one does not."""

    backend: str
    reasons: tuple[str, ...]


class Operator:
    """One operator: its reference and the modules of its backends, keyed by device type."""

    def __init__(self, name: str, reference: Implementation, backends: Mapping[str, str]) -> None:
        self.name = name
        self.reference = reference
        self.backends = dict(backends)
        self._chosen: dict[Case, Implementation] = {}
        self._modules: dict[str, ModuleType | str] = {}
        self._forced: str | None = None

    def choose(self, case: Case) -> Implementation:
        """The implementation for `case`; after the first time one dictionary lookup."""
        chosen = self._chosen.get(case)
        return self._resolve(case) if chosen is None else chosen

    def why_not(self, case: Case) -> list[str]:
        """Every reason why the backend of the case's device cannot serve it; empty when it can.

        A device for which the operator has no backend on purpose (the reference is the best there is) has
        no reasons either.
        """
        return self._reasons(self._forced or case.device, case)

    def unusable(self, backend: str) -> list[str]:
        """Why `backend` can serve no case at all in this process."""
        if backend == REFERENCE:
            return []
        if backend not in self.backends:
            return [f"{self.name} has no backend of that name (it has {', '.join(sorted(self.backends))})"]
        reasons = device_unusable(backend)
        if not reasons:
            module = self._module(backend)
            if isinstance(module, str):
                reasons.append(module)
        return reasons

    def forget(self) -> None:
        """Drops every choice and every loaded backend, as in a fresh process."""
        with _lock:
            self._chosen.clear()
            self._modules.clear()

    def _resolve(self, case: Case) -> Implementation:
        backend = self._forced or case.device
        reasons = self._reasons(backend, case)
        if reasons and self._forced is not None:
            raise RuntimeError(f"{self.name}: {backend} is forced and cannot serve this call: {'; '.join(reasons)}")
        if reasons:
            # Before remembering: a subscriber that raises (strict mode) must be asked again by the next call.
            report_fallback(self.name, backend, tuple(reasons))
        module = None if reasons else self._module(backend)
        chosen: Implementation = getattr(module, self.name) if isinstance(module, ModuleType) else self.reference
        self._chosen[case] = chosen
        return chosen

    def _reasons(self, backend: str, case: Case) -> list[str]:
        if backend == REFERENCE or backend not in self.backends:
            return []
        module = self._module(backend)
        if isinstance(module, ModuleType):
            reasons: list[str] = module.supported(case)
            return reasons
        return [] if module is None else [module]

    def _module(self, backend: str) -> ModuleType | str | None:
        """The loaded backend module, or the reason why it does not load."""
        if backend not in self.backends:
            return None
        module = self._modules.get(backend)
        if module is None:
            try:
                module = importlib.import_module(self.backends[backend])
            except Exception as error:  # whatever a vendor's library raises at import is the reason
                module = f"{self.backends[backend]} failed to import: {type(error).__name__}: {error}"
            self._modules[backend] = module
        return module


def operator(name: str) -> Operator:
    """The operator called `name`."""
    if name not in OPERATORS:
        raise ValueError(f"unknown operator {name!r}; there are {', '.join(OPERATORS)}")
    found: Operator = importlib.import_module(OPERATORS[name]).OPERATOR
    return found


def backends(op: str) -> dict[str, list[str]]:
    """Every backend of `op` with the reasons why it is unusable here; no reasons means usable."""
    found = operator(op)
    return {name: found.unusable(name) for name in (REFERENCE, *found.backends)}


def selected(op: str, device: str) -> Selection:
    """Which backend serves tensors of `device`, case by case refusals aside, and why no better one does."""
    found = operator(op)
    if device not in found.backends:
        return Selection(REFERENCE, ())
    reasons = found.unusable(device)
    if reasons:
        return Selection(REFERENCE, tuple(f"{device}: {reason}" for reason in reasons))
    return Selection(device, ())


def device_unusable(device: str) -> list[str]:
    """Why this process has no device of that type; empty when it has one."""
    if device == "cuda" and not torch.cuda.is_available():
        return ["no CUDA device"]
    if device == "npu":
        try:
            torch_npu: Any = importlib.import_module("torch_npu")
        except ModuleNotFoundError as error:
            if error.name == "torch_npu":
                return ["torch_npu is not installed"]
            return [f"torch_npu failed to import: {error}"]
        except Exception as error:  # a missing CANN library surfaces as OSError, ImportError or RuntimeError
            return [f"torch_npu failed to import: {type(error).__name__}: {error}"]
        if not torch_npu.npu.is_available():
            return ["no NPU device"]
    return []


def on_fallback(callback: FallbackCallback) -> Callable[[], None]:
    """Calls `callback(op, backend, reasons)` at every fallback not reported yet; returns how to stop that.

    An exception it raises reaches the caller of the operator, and the fallback then counts as not reported.
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
    """Within the block `op` runs on `backend` and nowhere else: what it cannot serve raises RuntimeError.

    The setting belongs to the process, not to the thread: a recomputed forward may run in autograd's thread.
    """
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


def report_fallback(op: str, backend: str, reasons: tuple[str, ...], to: str = "the reference") -> None:
    """Says once that `op` on `backend` is not served as it should be, by what instead, and why.

    A backend calls it when it serves a case itself but by a lesser way, such as without a compiler for its kernel.
    """
    said = (op, backend, reasons)
    with _lock:
        if said in _reported:
            return
        # One line for one cause: what keeps one operator's kernel from being compiled keeps every other one's.
        is_known = any(reasons == known for _, _, known in _reported)
        level = logging.INFO if is_known else logging.WARNING
        _log.log(level, "%s: %s falls back to %s: %s", op, backend, to, "; ".join(reasons))
        for callback in tuple(_subscribers):
            callback(op, backend, reasons)
        _reported.add(said)
