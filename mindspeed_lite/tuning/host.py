"""Watches what a step costs its host: launches and time by module, with `synchronizations`."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

from mindspeed_lite.ops import traced
from mindspeed_lite.text_layout import table, wrapped

from .host_tables import SYNCHRONIZATION_HEADERS, module_rows, synchronization_rows
from .operators import NodeModules, module_paths, moves_nothing
from .synchronizations import RECORDED, SynchronizationRecorder

_MODULE, _KERNEL, _NODE = "module of the model: ", "kernel of mindspeed_lite: ", "autograd::engine::evaluate_function"
_KERNELS = (_KERNEL, "## Call CompiledFxGraph")
# Calls of these have no place.
MASK, NUMBER, OUTSIDE = "[mask]", "[number]", "outside of the model"


@contextlib.contextmanager
def _forward_hooks(
    model: Sequence[torch.nn.Module], enter: Callable[[str], None], leave: Callable[[str, Sequence[Any], Any], None]
) -> Iterator[None]:
    """Calls `enter(path)` and `leave(path, inputs, output)` around each module's forward.

    The hooks are not the modules' own: features leave modules with hooks to Megatron.
    """
    paths = {id(module): path for module, path in module_paths(model) if not hasattr(module, "module")}  # no wrappers

    def before(module: torch.nn.Module, args: Any) -> None:
        if id(module) in paths:
            enter(paths[id(module)])

    def after(module: torch.nn.Module, args: Any, options: Mapping[str, Any], output: Any) -> None:
        if id(module) in paths:
            leave(paths[id(module)], (*args, *options.values()), output)

    hooks = [
        register_module_forward_pre_hook(before),
        register_module_forward_hook(after, with_kwargs=True, always_call=True),
    ]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


class LaunchRecorder:
    """Counts operators that compute or copy, compiled functions, and kernels of this package, by module and pass.

    A backward belongs to the module whose forward made its autograd node.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        # Reads within torch by module: an index by a mask, whose elements the host counts, and a tensor as a number.
        self.reads: Counter[tuple[str, str]] = Counter()
        self._stack: list[tuple[str, Any]] = []
        self._nodes = NodeModules()

    @contextlib.contextmanager
    def recording(self, model: Sequence[torch.nn.Module]) -> Iterator[None]:
        self._mark()
        traced.observer = _as_kernel
        try:
            profiler = profile(activities=[ProfilerActivity.CPU], acc_events=True)
            with _forward_hooks(model, self._enter, self._leave), profiler as profiled:
                yield
        finally:
            traced.observer = None
        for event in profiled.events():
            if event.cpu_parent is None:
                self._count(event, "", "forward")

    def _enter(self, kind: str) -> None:
        within = record_function(_MODULE + kind)
        within.__enter__()  # type: ignore[no-untyped-call]
        self._stack.append((kind, within))
        self._mark()

    def _leave(self, kind: str, given: Sequence[Any], output: Any) -> None:
        _, within = self._stack.pop()
        within.__exit__(None, None, None)
        self._mark()

    def _mark(self) -> None:
        self._nodes.mark(self._stack[-1][0] if self._stack else "")

    def _count(self, event: Any, module: str, during: str, is_recorded: bool = False) -> None:
        """is_recorded: within an operator, or a call that `SynchronizationRecorder` sees."""
        name = event.name
        if name.startswith(_MODULE):
            module, during = name.removeprefix(_MODULE), "forward" if during == "forward" else "recompute"
        elif name.startswith(_NODE):
            module, during = self._nodes.of(event.sequence_nr) if event.sequence_nr >= 0 else module, "backward"
        elif name == RECORDED:
            is_recorded = True
        elif name.startswith(_KERNELS) or (name.startswith("aten::") and _launches(name)):
            self.counts[module, during] += 1
            if name.startswith(("aten::index", "aten::_index_put")) and _contains(event, "aten::nonzero"):
                self.reads[MASK, module or OUTSIDE] += 1
            return
        elif name.startswith("aten::"):
            if name == "aten::item" and not is_recorded:
                self.reads[NUMBER, module or OUTSIDE] += 1
            if not _is_composite(name):
                return
            is_recorded = True
        for each in event.cpu_children:
            self._count(each, module, during, is_recorded)


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
        with _forward_hooks(model, self._enter, self._leave):
            yield

    def _enter(self, kind: str) -> None:
        self._starts.append(time.perf_counter())

    def _leave(self, kind: str, inputs: Sequence[Any], output: Any) -> None:
        is_again = torch._C._current_autograd_node() is not None
        self._add(kind, "recompute" if is_again else "forward", time.perf_counter() - self._starts.pop())
        given, made = _first_in_graph(inputs), _first_in_graph(output)
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
        counts.update(
            {each: count for each, count in self.launches.reads.items() if self._host_is_device or each[0] == MASK}
        )
        total = sum(counts.values())
        lines = [f"{total} synchronisation{'s' * (total != 1)} in a step" + (":" if total else "")]
        if self._host_is_device and total:
            lines += wrapped(
                "The device is the host: reads of tensors that a GPU's run has on the host count too.", columns
            )
        lines += table(SYNCHRONIZATION_HEADERS, synchronization_rows(counts), columns)
        spent = f", {1000 * self.seconds:.1f} ms of host time" if self.seconds else ""
        lines += ["", f"{sum(self.launches.counts.values())} launches in a step{spent}"]
        if self.times.seconds:
            calls = {kind: len(each) for (kind, during), each in self.times.seconds.items() if during == "forward"}
            headers, rows = module_rows(self.launches.counts, calls, self.times.seconds)
            lines += ["Of a call of a module, those within included:", *table(headers, rows, columns)]
        return "\n".join(lines)
