"""Watches what a step costs its host: synchronisations, launches, and time by module."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.weak import WeakTensorKeyDictionary

from mindspeed_lite.ops import traced
from mindspeed_lite.text_layout import table, wrapped

from .operators import NodeModules, module_paths, moves_nothing

PASSES = ("forward", "recompute", "backward")

# Read a tensor's values on the host.
_READS = {
    *("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__"),
    *("__format__", "__repr__", "__contains__"),
}
# Make tensors whose size depends on values.
_SIZED = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "equal", "is_nonzero"}
_SIZED |= {"allclose"}
_MADE = {"tensor", "as_tensor", "new_tensor"}
_MOVES = {"cpu", "to", "cuda", "copy_", "repeat_interleave"} | _MADE
# Stop the host until a device is done.
_WAITS = (
    ("torch.cuda", "synchronize"),
    ("torch.cuda.Event", "synchronize"),
    ("torch.cuda.Stream", "synchronize"),
    ("torch.distributed", "barrier"),
)


class SynchronizationRecorder:
    """Counts the calls that wait for a device, by call and place, within a `with` block.

    It replaces methods and functions of torch, since under a mode of torch's dispatcher compiled functions run
    uncompiled, with other rounding and random numbers. host_is_device: there is no other device, so that every tensor
    counts, but for copies by `cpu`.
    """

    def __init__(self, host_is_device: bool) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._host_is_device = host_is_device
        self._copies = WeakTensorKeyDictionary()
        self._undo = contextlib.ExitStack()
        # A call made by another.
        self._is_within = threading.local()

    def __enter__(self) -> SynchronizationRecorder:
        for name in sorted(_READS | _SIZED | _MOVES):
            # Of torch itself `cpu` and `cuda` are modules.
            for owner in (Tensor,) if name.startswith("__") else (Tensor, torch):
                if callable(getattr(owner, name, None)):
                    self._replace(owner, name, functools.partial(self._call, name))
        for owner_name, name in _WAITS:
            owner = functools.reduce(getattr, owner_name.split(".")[1:], torch)
            self._replace(owner, name, functools.partial(self._wait, f"{owner_name}.{name}"))
        return self

    def __exit__(self, *error: Any) -> None:
        self._undo.close()

    def _replace(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        original, is_own = getattr(owner, name), name in vars(owner)

        @functools.wraps(original)
        def replaced(*args: Any, **options: Any) -> Any:
            if getattr(self._is_within, "now", False):
                return original(*args, **options)
            self._is_within.now = True
            try:
                return call(original, *args, **options)
            finally:
                self._is_within.now = False

        self._undo.callback(*((setattr, owner, name, original) if is_own else (delattr, owner, name)))
        setattr(owner, name, replaced)

    def _call(self, name: str, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        if args and isinstance(args[0], Tensor) and args[0] in self._copies:
            self._keep(result)
        elif self._waits(name, args, options, result):
            self.counts[name, _place()] += 1
            if name == "cpu":
                self._keep(result)
        return result

    def _keep(self, result: Any) -> None:
        if isinstance(result, Tensor):
            self._copies[result] = True

    def _wait(self, name: str, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.counts[name, _place()] += 1
        # The device layer would take this caller for one that means the machine's GPUs.
        is_done = self._host_is_device and name.startswith("torch.cuda")
        return None if is_done else original(*args, **options)

    def _waits(self, name: str, args: Sequence[Any], options: Mapping[str, Any], result: Any) -> bool:
        first = args[0] if args else None
        if name in _MADE:
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
        if name == "repeat_interleave":
            is_given = options.get("output_size") is not None
            return is_on_device and len(args) > 1 and isinstance(args[1], Tensor) and not is_given
        return is_on_device


class LaunchRecorder:
    """Counts operators that compute or copy, compiled functions, and kernels of this package, by module and pass.

    A backward belongs to the module whose forward made its autograd node.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        # Indexing by a mask, which counts its elements on the host, by module.
        self.masks: Counter[str] = Counter()
        self._stack: list[tuple[str, Any]] = []
        self._nodes = NodeModules()

    @contextlib.contextmanager
    def recording(self, model: Sequence[torch.nn.Module]) -> Iterator[None]:
        hooks: list[Any] = []
        for module, kind in module_paths(model):
            if not hasattr(module, "module"):  # a wrapper
                hooks.append(module.register_forward_pre_hook(functools.partial(self._enter, kind)))
                hooks.append(module.register_forward_hook(self._leave, always_call=True))
        self._mark()
        traced.observer = _as_kernel
        try:
            with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
                yield
        finally:
            traced.observer = None
            for each in hooks:
                each.remove()
        for event in profiled.events():
            if event.cpu_parent is None:
                self._count(event, "", "forward")

    def _enter(self, kind: str, module: torch.nn.Module, args: Any) -> None:
        within = record_function(_MODULE + kind)
        within.__enter__()  # type: ignore[no-untyped-call]
        self._stack.append((kind, within))
        self._mark()

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        _, within = self._stack.pop()
        within.__exit__(None, None, None)
        self._mark()

    def _mark(self) -> None:
        self._nodes.mark(self._stack[-1][0] if self._stack else "")

    def _count(self, event: Any, module: str, during: str) -> None:
        name = event.name
        if name.startswith(_MODULE):
            module, during = name.removeprefix(_MODULE), "forward" if during == "forward" else "recompute"
        elif name.startswith(_NODE):
            module, during = self._nodes.of(event.sequence_nr) if event.sequence_nr >= 0 else module, "backward"
        elif name.startswith(_KERNELS) or (name.startswith("aten::") and _launches(name)):
            self.counts[module, during] += 1
            if name.startswith(("aten::index", "aten::_index_put")) and _contains(event, "aten::nonzero"):
                self.masks[module or "outside of the model"] += 1
            return
        elif name.startswith("aten::") and not _is_composite(name):
            return
        for each in event.cpu_children:
            self._count(each, module, during)


_MODULE, _KERNEL, _NODE = "module of the model: ", "kernel of mindspeed_lite: ", "autograd::engine::evaluate_function"
_KERNELS = (_KERNEL, "## Call CompiledFxGraph")


def _contains(event: Any, name: str) -> bool:
    return any(each.name == name or _contains(each, name) for each in event.cpu_children)


def _as_kernel(run: Callable[..., Any], *given: Any, **options: Any) -> Any:
    with record_function(f"{_KERNEL}{run.__name__}"):
        return run(*given, **options)


@functools.cache
def _launches(name: str) -> bool:
    """Whether an operator, `aten::name`, computes or copies."""
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    if packet is None or _is_composite(name):
        return False
    return not moves_nothing(getattr(packet, packet.overloads()[0]))


@functools.cache
def _is_composite(name: str) -> bool:
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    key = "CompositeImplicitAutograd"
    return packet is not None and torch._C._dispatch_has_kernel_for_dispatch_key(
        getattr(packet, packet.overloads()[0])._name, key
    )


class TimeRecorder:
    """Host time of modules, those within included: forward, and backward from the output's gradient to the input's."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], list[float]] = {}
        self._starts: list[float] = []

    @contextlib.contextmanager
    def recording(self, model: Sequence[torch.nn.Module]) -> Iterator[None]:
        hooks: list[Any] = []
        for module, kind in module_paths(model):
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
        given, made = _first_in_graph((*args, *options.values())), _first_in_graph(output)
        if given is None or made is None or given is made:
            return
        started: list[float] = []
        made.register_hook(lambda gradient: started.append(time.perf_counter()))  # type: ignore[no-untyped-call]
        given.register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: self._add(kind, "backward", time.perf_counter() - started.pop()) if started else None
        )

    def _add(self, kind: str, during: str, seconds: float) -> None:
        self.seconds.setdefault((kind, during), []).append(seconds)


def _first_in_graph(given: Any) -> Tensor | None:
    """The first tensor with an autograd node; a hook of a leaf would stay after the step."""
    values = given if isinstance(given, (tuple, list)) else (given,)
    return next((each for each in values if isinstance(each, Tensor) and each.grad_fn is not None), None)


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
        self.launches = LaunchRecorder()
        self.times = TimeRecorder()
        self.seconds = 0.0

    @contextlib.contextmanager
    def counting(self, model: Sequence[torch.nn.Module]) -> Iterator[None]:
        with self.synchronizations, self.launches.recording(model):
            yield

    @contextlib.contextmanager
    def timing(self, model: Sequence[torch.nn.Module]) -> Iterator[None]:
        started = time.perf_counter()
        with self.times.recording(model):
            yield
        self.seconds = time.perf_counter() - started

    def to_text(self, columns: int) -> str:
        """Tables of synchronisations, most frequent first, and of modules, each by call."""
        counts = Counter(self.synchronizations.counts)
        counts.update({("[mask]", module): count for module, count in self.launches.masks.items()})
        total = sum(counts.values())
        lines = [f"{total} synchronisation{'s' * (total != 1)} in a step" + (":" if total else "")]
        if self._host_is_device and total:
            lines += wrapped(
                "The device is the host: reads of tensors that a GPU's run has on the host count too.", columns
            )
        found = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
        lines += table(("calls", "call", "where"), [(str(n), call, place) for (call, place), n in found], columns)
        counted = self.launches.counts
        launches = sum(counted.values())
        spent = f", {1000 * self.seconds:.1f} ms of host time" if self.seconds else ""
        lines += ["", f"{launches} launches in a step{spent}"]
        if not self.times.seconds:
            return "\n".join(lines)
        passes = [each for each in PASSES if any(during == each for _, during in self.times.seconds)]
        headers = ("module", "calls", *(f"{each} {unit}" for unit in ("launches", "ms") for each in passes))
        rows = []
        for kind in sorted({kind for kind, _ in self.times.seconds if _is_shown(kind)}):
            calls = len(self.times.seconds.get((kind, "forward"), ()))
            within = {each: n for each, n in counted.items() if f"{each[0]}.".startswith(f"{kind}." if kind else "")}
            if not within:
                continue
            by_pass = {each: sum(n for (_, during), n in within.items() if during == each) for each in passes}
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
