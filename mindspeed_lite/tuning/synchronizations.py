"""Counts the calls of a step that wait for a device."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import record_function

# The profiler's range around a counted call.
RECORDED = "recorded synchronisation"

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
# Shape of a CPU generator's state. Those who read it cannot be watched: the device layer answers by the caller.
_STATE = torch.Generator().get_state().shape
# Stop the host until a device is done.
_WAITS = (
    *((f"torch.{device}", "synchronize") for device in ("cuda", "npu", "accelerator")),
    *((f"torch.{device}.{kind}", "synchronize") for device in ("cuda", "npu") for kind in ("Event", "Stream")),
    *(("torch.cuda", "empty_cache"), ("torch.npu", "empty_cache")),
    *(("torch.distributed", "barrier"), ("torch.distributed", "monitored_barrier")),
)


class SynchronizationRecorder:
    """Counts, within a `with` block, the calls that wait for a device, by call and place.

    Replaces methods and functions of torch; under a mode of its dispatcher compiled functions would run uncompiled,
    with other bits.

    Args:
        host_is_device: all tensors count but copies by `cpu`, those made of values of the host, and what follows.
        is_hidden: whether torch itself calls, in place of an operator.
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
        if self._host_is_device and tensor.dtype == torch.uint8 and tensor.shape == _STATE:
            return True
        return tensor.layout == torch.strided and tensor.untyped_storage()._cdata in self._copies

    def __enter__(self) -> SynchronizationRecorder:
        for name in sorted(_READS | _SIZED | _AT_TIMES | _MADE | _MOVES | _CARRIES):
            # Of torch itself `cpu` and `cuda` are modules.
            for owner in (Tensor,) if name.startswith("__") else (Tensor, torch, torch.nn.functional):
                if callable(getattr(owner, name, None)):
                    self._replace(owner, name, functools.partial(self._call, name))
        for owner_name, name in _WAITS:
            found: Any = torch
            for part in owner_name.split(".")[1:]:
                found = getattr(found, part, None)
            if hasattr(found, name):
                self._replace(found, name, functools.partial(self._wait, f"{owner_name}.{name}"))
        return self

    def __exit__(self, *error: Any) -> None:
        self._undo.close()

    def _replace(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        original, is_own = getattr(owner, name), name in vars(owner)

        @functools.wraps(original)
        def replaced(*args: Any, **options: Any) -> Any:
            if self.is_within:
                return original(*args, **options)
            self._is_within.now = True
            is_profiled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
            try:
                with record_function(RECORDED) if is_profiled else contextlib.nullcontext():
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
        if name in _CARRIES:
            return result
        if is_copy and self.is_copy(result):
            # The CPU's device layer sends nothing.
            result = result.clone()
        if self._waits(name, args, options, result, is_copy):
            self._count(name)
            is_read = name in ("cpu", "to") and _device(name, args, options) == "cpu"
            return self._kept(result, args[0]) if is_read else result
        is_made = self._host_is_device and name in ("tensor", "as_tensor") and options.get("device") is None
        return self._kept(result) if is_made and not isinstance(next(iter(args), None), Tensor) else result

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


def _place() -> str:
    """The first caller outside torch, as module:line function."""
    frame = sys._getframe(2)
    while frame.f_back is not None and re.match(r"(torch|mindspeed_lite\.(tuning|dryrun))(\.|$)", _module(frame)):
        frame = frame.f_back
    return f"{_module(frame)}:{frame.f_lineno} {frame.f_code.co_name}"


def _module(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", "?"))
