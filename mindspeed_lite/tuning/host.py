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
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

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
_SIZED |= {"allclose", "combinations"}
# Wait with some arguments only.
_AT_TIMES = {"where", "repeat_interleave", "one_hot", "histc", "narrow"}
_MADE = {"tensor", "as_tensor", "new_tensor"}
_MOVES = {"cpu", "to", "cuda", "copy_"}
# What they make of the host's tensors is the host's. `__getitem__` in Python would make a tensor a sequence.
_CARRIES = {f"__{name}__" for name in ("add", "radd", "sub", "mul", "rmul", "eq", "ne", "lt", "le", "gt", "ge")}
_CARRIES |= {"all", "any", "sum", "max", "min", "norm", "clone", "long", "float"}
# Of a generator's state on the host.
_STATE = torch.Generator().get_state().shape
# Stop the host until a device is done.
_WAITS = (
    *((f"torch.{device}", "synchronize") for device in ("cuda", "npu", "accelerator")),
    *((f"torch.{device}.{kind}", "synchronize") for device in ("cuda", "npu") for kind in ("Event", "Stream")),
    *(("torch.cuda", "empty_cache"), ("torch.npu", "empty_cache")),
    *(("torch.distributed", "barrier"), ("torch.distributed", "monitored_barrier")),
)


class SynchronizationRecorder:
    """Counts the calls that wait for a device, by call and place, within a `with` block.

    It replaces methods and functions of torch, since under a mode of torch's dispatcher compiled functions run
    uncompiled, with other rounding and random numbers. host_is_device: there is no other device, so that every tensor
    counts, but for copies by `cpu`, what is made of values of the host, and what is made of these. is_hidden: whether
    torch itself calls, in place of an operator.
    """

    def __init__(self, host_is_device: bool, is_hidden: Callable[[], bool] = lambda: False) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._host_is_device, self._is_hidden = host_is_device, is_hidden
        # Storages of the host.
        self._copies: dict[int, StorageWeakRef] = {}
        self._undo = contextlib.ExitStack()
        # A call made by another.
        self._is_within = threading.local()

    @property
    def is_within(self) -> bool:
        """True in a call that is seen."""
        return getattr(self._is_within, "now", False) or self._is_hidden()

    def is_copy(self, tensor: Tensor) -> bool:
        """True for a tensor that a run on a device has on the host."""
        if tensor.dtype == torch.uint8 and tensor.shape == _STATE:
            return True
        return tensor.layout == torch.strided and tensor.untyped_storage()._cdata in self._copies

    def __enter__(self) -> SynchronizationRecorder:
        for name in sorted(_READS | _SIZED | _AT_TIMES | _MADE | _MOVES | _CARRIES):
            # Of torch itself `cpu` and `cuda` are modules.
            for owner in (Tensor,) if name.startswith("__") else (Tensor, torch, torch.nn.functional):
                if callable(getattr(owner, name, None)):
                    call = self._carry if name in _CARRIES else functools.partial(self._call, name)
                    self._replace(owner, name, call, is_recorded=name not in _CARRIES)
        for owner_name, name in _WAITS:
            found: Any = torch
            for part in owner_name.split(".")[1:]:
                found = getattr(found, part, None)
            if hasattr(found, name):
                self._replace(found, name, functools.partial(self._wait, f"{owner_name}.{name}"))
        return self

    def __exit__(self, *error: Any) -> None:
        self._undo.close()

    def _replace(self, owner: Any, name: str, call: Callable[..., Any], is_recorded: bool = True) -> None:
        original, is_own = getattr(owner, name), name in vars(owner)

        @functools.wraps(original)
        def replaced(*args: Any, **options: Any) -> Any:
            if self.is_within:
                return original(*args, **options)
            if not is_recorded:
                return call(original, *args, **options)
            self._is_within.now = True
            is_profiled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
            try:
                with record_function(_RECORDED) if is_profiled else contextlib.nullcontext():
                    return call(original, *args, **options)
            finally:
                self._is_within.now = False

        self._undo.callback(*((setattr, owner, name, original) if is_own else (delattr, owner, name)))
        setattr(owner, name, replaced)

    def _call(self, name: str, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        is_copy = bool(args) and isinstance(args[0], Tensor) and self.is_copy(args[0])
        is_sent = name in ("to", "cuda") and _device(name, args, options) not in ("cpu", "")
        if is_copy and not is_sent:
            return self._kept(result, args[0])
        if is_copy and self.is_copy(result):
            # The CPU's device layer sends nothing.
            result = result.clone()
        if self._waits(name, args, options, result, is_copy):
            self._count(name)
            is_read = name in ("cpu", "to") and _device(name, args, options) == "cpu"
            return self._kept(result, args[0]) if is_read else result
        is_made = self._host_is_device and name in ("tensor", "as_tensor") and options.get("device") is None
        return self._kept(result) if is_made and not isinstance(next(iter(args), None), Tensor) else result

    def _carry(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        is_copy = isinstance(args[0], Tensor) and self.is_copy(args[0])
        return self._kept(result) if is_copy else result

    def _kept(self, result: Any, source: Any = None) -> Any:
        """`result` as one of the host; a copy of `source`, which may be on a device."""
        if isinstance(result, Tensor) and result.layout == torch.strided:
            if result is source and not self.is_copy(source):
                result = result.clone()
            storage = result.untyped_storage()
            self._copies[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        for each in result if isinstance(result, (list, tuple)) else ():
            self._kept(each)
        return result

    def _count(self, name: str) -> None:
        place = _place()
        # A kernel of the CPU is another one on a device; optimizers of torch count steps on the host, and a dry run's
        # messages are passed there.
        is_own = _module(sys._getframe(3)).startswith(("torch.optim.", "mindspeed_lite.dryrun."))
        if not (is_own or re.match(r"mindspeed_lite\.ops\.\w+\.cpu:", place)):
            self.counts[name, place] += 1

    def _wait(self, name: str, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self._count(name)
        # The device layer would take this caller for one that means the machine's GPUs.
        is_done = self._host_is_device and name.startswith("torch.cuda")
        return None if is_done else original(*args, **options)

    def _waits(self, name: str, args: tuple[Any, ...], options: Mapping[str, Any], result: Any, is_copy: bool) -> bool:
        first = next(iter((*args, *options.values())), None)
        if name in _MADE:
            values = options.get("data", args[-1] if args else None) if name == "new_tensor" else first
            if isinstance(values, Tensor):  # not to the host
                return False
            # Values of the host go to a device in a copy that waits.
            if not self._host_is_device:
                return isinstance(result, Tensor) and result.device.type not in ("cpu", "meta")
            is_read = isinstance(values, (list, tuple)) and any(isinstance(each, Tensor) for each in values)
            return is_read or name == "new_tensor" or _device(name, args, options) not in ("cpu", "")
        if not isinstance(first, Tensor):
            return False
        is_on_device = self._host_is_device or first.device.type != "cpu"
        if name == "narrow":
            return is_on_device and any(isinstance(each, Tensor) and not self.is_copy(each) for each in args[1:])
        if name in _MOVES:
            other = next(iter(args[1:]), options.get("other")) if name == "copy_" else result
            is_moved = isinstance(other, Tensor) and other.device.type != first.device.type
            given = [each for each in (*args[1:], options.get("non_blocking")) if isinstance(each, bool)]
            is_named = name != "copy_" and _device(name, args, options) == "cpu"
            return not any(given) and (is_moved or is_copy or (self._host_is_device and is_named))
        if name in _AT_TIMES:
            return is_on_device and _reads(name, args, options)
        return is_on_device


def _device(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> str:
    """Type of the device that a call names; "" without one, and for that of another tensor on the CPU."""
    if name in ("cpu", "cuda"):
        return name
    named = [each for each in (*args[1:2], options.get("device")) if isinstance(each, (str, int, torch.device))]
    found = next((each for each in named if not isinstance(each, bool)), "")
    if isinstance(found, int):
        return "cuda"
    return "" if found in ("", torch.device("cpu")) else torch.device(found).type


def _reads(name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Whether an operator that does so at times has a size that depends on values."""
    if name == "where":
        return len(args) + len(options) == 1
    if name == "one_hot":
        return bool((args[1] if len(args) > 1 else options.get("num_classes", -1)) == -1)
    if name == "histc":
        low, high = (options.get(each, (*args[2:4], 0, 0)[place]) for place, each in enumerate(("min", "max")))
        return bool(low == high)
    repeats = args[1] if len(args) > 1 else options.get("repeats", next(iter(args), None))
    return isinstance(repeats, Tensor) and options.get("output_size") is None


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
        elif name == _RECORDED:
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


_MODULE, _KERNEL, _NODE = "module of the model: ", "kernel of mindspeed_lite: ", "autograd::engine::evaluate_function"
_KERNELS = (_KERNEL, "## Call CompiledFxGraph")
_RECORDED = "recorded synchronisation"
# Calls of these have no place.
MASK, NUMBER, OUTSIDE = "[mask]", "[number]", "outside of the model"


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


def _place() -> str:
    """The first caller outside torch, as module:line function."""
    frame = sys._getframe(2)
    while frame.f_back is not None and re.match(r"(torch|mindspeed_lite\.(tuning|dryrun))(\.|$)", _module(frame)):
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


SYNCHRONIZATION_HEADERS = ("calls", "call", "where")


def synchronization_rows(counts: Counter[tuple[str, str]]) -> list[tuple[str, ...]]:
    found = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    return [(str(count), call, place) for (call, place), count in found]


def module_rows(
    launches: Mapping[tuple[str, str], int], calls: Mapping[str, int],
    seconds: Mapping[tuple[str, str], Sequence[float]],
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:  # fmt: skip
    """Headers and rows: launches of a call of a module by pass, those of modules within included, and time if known."""
    passes = [each for each in PASSES if any(during == each for _, during in launches)]
    timed = passes if seconds else []
    rows = []
    for kind in sorted(filter(_is_shown, calls)):
        within = {each: n for each, n in launches.items() if f"{each[0]}.".startswith(f"{kind}." if kind else "")}
        if not within:
            continue
        by_pass = [sum(n for (_, during), n in within.items() if during == each) for each in passes]
        times = [seconds.get((kind, each), ()) for each in timed]
        rows.append((
            kind or "model", str(calls[kind]), *(_figure(each / max(1, calls[kind])) for each in by_pass),
            *(f"{1000 * sum(each) / len(each):.2f}" if each else "-" for each in times),
        ))  # fmt: skip
    return ("module", "calls", *(f"{each} launches" for each in passes), *(f"{each} ms" for each in timed)), rows


def _is_shown(kind: str) -> bool:
    """A layer, its parts, and modules outside of layers."""
    return kind.partition(".*")[2].count(".") <= 1


def _figure(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
