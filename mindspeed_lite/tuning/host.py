"""Watches what a step costs its host: synchronisations, launches, and time by module."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from mindspeed_lite.text_layout import table, wrapped

from .work import WorkRecorder, module_kinds

PASSES = ("forward", "recompute", "backward")

# Read a tensor's values on the host.
_READS = {
    *("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__"),
    *("__format__", "__repr__", "__contains__"),
}
# Make tensors whose size depends on values.
_SIZED = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "equal", "is_nonzero"}
_SIZED |= {"allclose", "histogram"}
# Stop the host until a device is done.
_WAITS = (
    ("torch.cuda", "synchronize"),
    ("torch.cuda.Event", "synchronize"),
    ("torch.cuda.Stream", "synchronize"),
    ("torch.distributed", "barrier"),
)


class SynchronizationRecorder(TorchFunctionMode):
    """Counts the calls that wait for a device, by call and place.

    host_is_device: there is no other device, so that every tensor counts.
    """

    def __init__(self, host_is_device: bool) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, str]] = Counter()
        self._host_is_device = host_is_device
        # Tensors that a device's run has on the host: copies, and what is made of them.
        self._copies = WeakTensorKeyDictionary()
        self._replaced: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> SynchronizationRecorder:
        for owner_name, name in _WAITS:
            owner = functools.reduce(getattr, owner_name.split(".")[1:], torch)
            original = getattr(owner, name)
            self._replaced.append((owner, name, original))
            setattr(owner, name, self._counted(f"{owner_name}.{name}", original))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        while self._replaced:
            owner, name, original = self._replaced.pop()
            setattr(owner, name, original)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        name = getattr(func, "__name__", "")
        result = func(*args, **options)
        tensors = [each for each in (*args, *options.values()) if isinstance(each, Tensor)]
        is_on_host = bool(tensors) and all(each in self._copies for each in tensors)
        if is_on_host or (name == "cpu" and self._host_is_device):
            for each in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(each, Tensor):
                    self._copies[each] = True
        if not is_on_host and self._waits(name, args, options, result):
            self.counts[name, _place()] += 1
        return result

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **options: Any) -> Any:
            self.counts[name, _place()] += 1
            # The device layer would take this caller for one that means the machine's GPUs.
            is_done = self._host_is_device and name.startswith("torch.cuda")
            return None if is_done else original(*args, **options)

        return call

    def _waits(self, name: str, args: Sequence[Any], options: Mapping[str, Any], result: Any) -> bool:
        first = args[0] if args else None
        if name in ("tensor", "as_tensor"):
            # Values of the host go to a device in a copy that waits.
            return isinstance(result, Tensor) and result.device.type not in ("cpu", "meta")
        if not isinstance(first, Tensor):
            return False
        is_on_device = self._host_is_device or first.device.type != "cpu"
        if name in ("cpu", "to", "cuda", "copy_"):
            other = args[1] if name == "copy_" else result
            is_moved = isinstance(other, Tensor) and other.device.type != first.device.type
            given = [each for each in (*args[1:], options.get("non_blocking")) if isinstance(each, bool)]
            return (is_moved and not any(given)) or (name == "cpu" and self._host_is_device)
        if name == "where":
            return is_on_device and len(args) == 1
        if name == "repeat_interleave":
            is_given = options.get("output_size") is not None
            return is_on_device and len(args) > 1 and isinstance(args[1], Tensor) and not is_given
        if name in ("__getitem__", "__setitem__"):
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            is_masked = any(isinstance(each, Tensor) and each.dtype is torch.bool for each in indices)
            # One value is filled in without counting.
            is_filled = name == "__setitem__" and not (isinstance(args[2], Tensor) and args[2].numel() != 1)
            return is_on_device and is_masked and not is_filled
        return is_on_device and name in _READS | _SIZED


class _Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows operators to `observe`."""

    observe: Callable[..., None] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.observe is not None:
            self.observe(func, args, kwargs or {}, result)
        return result


class TimeRecorder:
    """Host time of modules, those within included: forward, and backward from the output's gradient to the input's."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], list[float]] = {}
        self._starts: list[float] = []

    @contextlib.contextmanager
    def recording(self, model: Sequence[torch.nn.Module]) -> Iterator[None]:
        hooks: list[Any] = []
        for module, kind in module_kinds(model):
            if not hasattr(module, "module"):  # a wrapper
                hooks.append(module.register_forward_pre_hook(self._enter))
                hooks.append(module.register_forward_hook(functools.partial(self._leave, kind), with_kwargs=True))
        try:
            yield
        finally:
            for each in hooks:
                each.remove()

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        self._starts.append(time.perf_counter())

    def _leave(self, kind: str, module: torch.nn.Module, args: Any, options: Mapping[str, Any], output: Any) -> None:
        is_again = torch._C._current_autograd_node() is not None
        self._add(kind, "recompute" if is_again else "forward", time.perf_counter() - self._starts.pop())
        given, made = _first_with_gradient((*args, *options.values())), _first_with_gradient(output)
        if given is None or made is None or given is made:
            return
        started: list[float] = []
        made.register_hook(lambda gradient: started.append(time.perf_counter()))  # type: ignore[no-untyped-call]
        given.register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: self._add(kind, "backward", time.perf_counter() - started.pop()) if started else None
        )

    def _add(self, kind: str, during: str, seconds: float) -> None:
        self.seconds.setdefault((kind, during), []).append(seconds)


def _first_with_gradient(given: Any) -> Tensor | None:
    values = given if isinstance(given, (tuple, list)) else (given,)
    return next((each for each in values if isinstance(each, Tensor) and each.requires_grad), None)


def _place() -> str:
    """The first caller outside torch, as module:line function."""
    frame = sys._getframe(2)
    while frame.f_back is not None and re.match(r"(torch|mindspeed_lite\.tuning)(\.|$)", _module(frame)):
        frame = frame.f_back
    return f"{_module(frame)}:{frame.f_lineno} {frame.f_code.co_name}"


def _module(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", "?"))


class StepWatch:
    """Watches two steps: one for synchronisations and launches, the next for time, which counting would change."""

    def __init__(self, host_is_device: bool) -> None:
        self._host_is_device = host_is_device
        self.synchronizations = SynchronizationRecorder(host_is_device)
        self.work = WorkRecorder()
        self.times = TimeRecorder()
        self.seconds = 0.0

    @contextlib.contextmanager
    def counting(self, model: Sequence[torch.nn.Module]) -> Iterator[None]:
        mode = _Launches()  # type: ignore[no-untyped-call]
        with self.synchronizations, mode, self.work.recording(mode, model):
            yield

    @contextlib.contextmanager
    def timing(self, model: Sequence[torch.nn.Module]) -> Iterator[None]:
        started = time.perf_counter()
        with self.times.recording(model):
            yield
        self.seconds = time.perf_counter() - started

    def to_text(self, columns: int) -> str:
        """Tables of synchronisations, most frequent first, and of modules, each by call."""
        total = sum(self.synchronizations.counts.values())
        lines = [f"{total} synchronisations in a step" + (":" if total else "")]
        if self._host_is_device and total:
            lines += wrapped(
                "The device is the host: reads of tensors that a GPU's run has on the host count too.", columns
            )
        found = sorted(self.synchronizations.counts.items(), key=lambda each: (-each[1], each[0]))
        lines += table(("calls", "call", "where"), [(str(n), call, place) for (call, place), n in found], columns)
        counted = self.work.counted()
        launches = sum(each["launches"] for each in counted)
        spent = f", {1000 * self.seconds:.1f} ms of host time" if self.seconds else ""
        lines += ["", f"{launches} launches in a step{spent}"]
        if not self.times.seconds:
            return "\n".join(lines)
        passes = [each for each in PASSES if any(during == each for _, during in self.times.seconds)]
        headers = ("module", "calls", *(f"{each} {unit}" for unit in ("launches", "ms") for each in passes))
        rows = []
        for kind in sorted({kind for kind, _ in self.times.seconds if _is_shown(kind)}):
            calls = len(self.times.seconds.get((kind, "forward"), ()))
            within = [each for each in counted if f"{each['module']}.".startswith(f"{kind}." if kind else "")]
            if not within:
                continue
            by_pass = {each: sum(one["launches"] for one in within if one["pass"] == each) for each in passes}
            times = {each: self.times.seconds.get((kind, each), []) for each in passes}
            rows.append((
                kind or "model", str(calls), *(_figure(by_pass[each] / max(1, calls)) for each in passes),
                *(f"{1000 * sum(each) / len(each):.2f}" if each else "-" for each in times.values()),
            ))  # fmt: skip
        lines += ["Of a call of a module, those within included:", *table(headers, rows, columns)]
        return "\n".join(lines)


def _is_shown(kind: str) -> bool:
    """A layer, its parts, and modules outside of layers."""
    return kind.partition(".*")[2].count(".") <= 1


def _figure(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
