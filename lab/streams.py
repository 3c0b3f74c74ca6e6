"""Emulated streams of the CPU device: collectives of a side stream overlap with computation (`lanes`).

`install()` replaces the device layer's streams in this process; `torch.cuda` must mean the CPU already.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lab import lanes
from mindspeed_lite.ops import native
from mindspeed_lite.platform import streams
from mindspeed_lite.platform.redirect import Redirects, for_the_host

_COLLECTIVES = ("all_gather_into_tensor", "all_reduce", "all_to_all_single", "reduce_scatter_tensor")


class Event(streams.Event):
    """A position in a stream; `elapsed_time` is wall-clock milliseconds."""

    _mark: lanes.Mark | None = None

    def record(self, stream: Any = None) -> None:
        super().record(stream)
        self._mark = _lane_of(current_stream() if stream is None else stream).mark()

    def query(self) -> bool:
        return self._mark is None or self._mark.lane.is_done(self._mark.issued)

    def wait(self, stream: Any = None) -> None:
        _wait(current_stream() if stream is None else stream, self._mark)

    def synchronize(self) -> None:
        if self._mark is not None:
            self._mark.lane.finish(self._mark.issued)
            self._mark = None


class Stream(streams.Stream):
    """A stream whose collectives, and operators that depend on them, may be pending."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        super().__init__(device, priority, **kwargs)
        self.lane = lanes.Lane()
        # Whether it has ever issued or waited for a collective.
        self.carries = False

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        _wait(self, _lane_of(stream).mark())

    def record_event(self, event: Any = None) -> Event:
        recorded: Event = Event() if event is None else event
        recorded.record(self)
        return recorded

    def query(self) -> bool:
        return not self.lane

    def synchronize(self) -> None:
        self.lane.finish()

    def __enter__(self) -> Stream:
        StreamContext(self).__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        StreamContext(self).__exit__(*exc)


DEFAULT_STREAM = Stream()
_NO_LANE = lanes.Lane()


class _Entered(NamedTuple):
    """A stream, its dispatch mode, and the number of dispatch modes after entering it."""

    stream: Stream
    queueing: lanes.Queueing | None = None
    modes: int = 0


class _Thread(threading.local):
    """The streams that a thread has entered; the last is the current one."""

    def __init__(self) -> None:
        self.entered = [_Entered(DEFAULT_STREAM)]


_thread = _Thread()


def current_stream(device: Any = None) -> Stream:
    return _thread.entered[-1].stream


def queueing_lane() -> lanes.Lane | None:
    """The lane that operators issued now join; None where they run at once."""
    now = _thread.entered[-1]
    here = now.queueing is not None and torch._C._len_torch_dispatch_stack() == now.modes
    return now.stream.lane if here else None


def current_lane() -> lanes.Lane | None:
    """The lane that a collective issued now joins; None where it is waited for.

    The first collective of a stream is waited for: until then its operators need no dispatch mode, and compiled code
    runs compiled.
    """
    now = current_stream()
    if now is DEFAULT_STREAM:
        return None
    now.carries = True
    return queueing_lane()


class StreamContext:
    """Reentrant context that issues work on `stream`, per thread."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        before = _thread.entered[-1]
        if not isinstance(self.stream, Stream) or self.stream is before.stream:
            _thread.entered.append(before)
            return
        queueing = lanes.Queueing(self.stream.lane) if self.stream.carries else None
        if queueing is not None:
            queueing.__enter__()  # type: ignore[no-untyped-call]
        if before.queueing is not None:
            before.queueing.is_current = False
        _thread.entered.append(_Entered(self.stream, queueing, torch._C._len_torch_dispatch_stack()))

    def __exit__(self, *exc: Any) -> None:
        left, now = _thread.entered.pop(), _thread.entered[-1]
        if left is now:
            return
        if now.queueing is not None:
            now.queueing.is_current = True
        if left.queueing is not None:
            left.queueing.__exit__(*exc)  # type: ignore[no-untyped-call]


def _wait(stream: Any, mark: lanes.Mark | None) -> None:
    """Let `stream` wait for a mark: its later operators that read results of the marked work join its lane."""
    if mark is None or mark.lane.is_done(mark.issued) or mark.lane is _lane_of(stream):
        return
    has_mode = isinstance(stream, Stream) and stream is not DEFAULT_STREAM
    if has_mode:
        stream.carries = True
        has_mode = stream is not current_stream() or queueing_lane() is not None
    if has_mode:
        stream.lane.follow(mark)
    else:
        mark.lane.finish(mark.issued)


def _lane_of(stream: Any) -> lanes.Lane:
    return stream.lane if isinstance(stream, Stream) else _NO_LANE


# ---------------------------------------------------------------------------------------------------------------------


def install() -> Callable[[], None]:
    """Replace the streams of this process; returns an undo callable, which finishes pending work.

    Call it before native kernels are loaded, or they finish lanes where they could join them.
    """
    redirects, cuda = Redirects(), torch.cuda
    for name, answer in (
        ("synchronize", lambda device=None: lanes.finish_all()),
        ("current_stream", current_stream),
        ("default_stream", lambda device=None: DEFAULT_STREAM),
        # The work of a stream that is set and not entered runs at once.
        ("set_stream", lambda stream: None),
        ("stream", StreamContext),
    ):
        redirects.wrap(cuda, name, functools.partial(for_the_host, answer=answer))
    for name, value in (("Stream", Stream), ("StreamContext", StreamContext), ("Event", Event)):
        redirects.set(cuda, name, value)
    for name in _COLLECTIVES:
        redirects.wrap(dist, name, _collective)
    _guard_memory(redirects)
    redirects.set(native, "_call", _native_call(native._call))
    redirects.callback(lanes.finish_all)
    redirects.callback(_leave_compiled_code)
    return redirects.close


def _collective(original: Callable[..., Any]) -> Callable[..., Any]:
    """Leave a collective pending in the stream where it is issued, unless it is asynchronous already."""

    @functools.wraps(original)
    def issue(*args: Any, **kwargs: Any) -> Any:
        lane = current_lane()
        if lane is None and not lanes.are_open():
            return original(*args, **kwargs)
        # By position and name, since a foreign wrapper may have no signature: the first tensor is written, and
        # `async_op` is the last parameter.
        named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        written = next(named[each] for each in (0, "output_tensor", "output", "tensor") if each in named)
        read = [each for each in named.values() if isinstance(each, torch.Tensor) and each is not written]
        lanes.finish_for(read)
        lanes.finish_for((written,), writing=True)
        # A coalescing manager issues its collectives and waits for them itself.
        is_coalesced = bool(dist.distributed_c10d._world.pg_coalesce_state)
        if lane is None or is_coalesced or kwargs.get("async_op") or any(each is True for each in args):
            return original(*args, **kwargs)
        work = original(*(each for each in args if each is not False), **{**kwargs, "async_op": True})
        if work is not None:
            lane.put(work.wait, read, (written,))
            _watch_compiled_code()
        return None

    return issue


def _native_call(original: Callable[..., None]) -> Callable[..., None]:
    """Let a native kernel that reads pending results join the lane."""

    def call(function: Callable[..., Any], *given: Any) -> None:
        tensors: list[torch.Tensor] = []
        for each in given:
            tensors += [one for one in (each if isinstance(each, (list, tuple)) else (each,)) if torch.is_tensor(one)]
        lane = queueing_lane()
        if lane is not None and lane.last(tensors, writing=True):
            lane.put(functools.partial(original, function, *given), writes=tensors)
        else:
            lanes.finish_for(tensors)
            original(function, *given)

    return call


def _guard_memory(redirects: Redirects) -> None:
    """Finish lanes before memory is read or resized without an operator."""
    tensor, storage = torch.Tensor, torch.UntypedStorage

    def finished(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def read(self: Any, *args: Any, **kwargs: Any) -> Any:
            if lanes.are_open():
                lanes.finish_for((self,))
                now = queueing_lane()
                if now is not None:
                    # The caller may write, in the order of the stream.
                    now.finish(now.last((self,), writing=True))
            return original(self, *args, **kwargs)

        return read

    for name in ("data_ptr", "numpy", "tolist", "cpu", "__dlpack__"):
        redirects.set(tensor, name, finished(getattr(tensor, name)))
    redirects.set(storage, "data_ptr", finished(storage.data_ptr))

    own_to, own_resize = tensor.to, storage.resize_

    @functools.wraps(own_to)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # The string names the host; `tensor.device` is a torch.device.
        named = args[0] if args else kwargs.get("device")
        if isinstance(named, str) and named == "cpu" and not kwargs.get("non_blocking"):
            lanes.finish_for((self,))
        return own_to(self, *args, **kwargs)

    @functools.wraps(own_resize)
    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        for lane in lanes.pending():
            last = lane.last((self,), writing=True)
            if last and not size:
                # A GPU frees memory in the order of the stream that uses it (`record_stream`).
                lane.put(functools.partial(own_resize, self, size), writes=(self,))
                return self
            lane.finish(last)
        return own_resize(self, size)

    redirects.set(tensor, "to", to)
    redirects.set(storage, "resize_", resize_)


_compiled: list[tuple[Any, Callable[..., Any]]] = []


def _watch_compiled_code() -> None:
    """Finish lanes before Inductor's kernels, which no dispatch mode sees; its module loads on first use."""
    module = sys.modules.get("torch._inductor.output_code")
    if _compiled or module is None:
        return
    graph = module.CompiledFxGraph
    original = graph.__call__

    @functools.wraps(original)
    def call(self: Any, inputs: Sequence[Any]) -> Any:
        if lanes.are_open():
            lanes.finish_for([each for each in inputs if isinstance(each, torch.Tensor)], writing=True)
        return original(self, inputs)

    graph.__call__ = call
    _compiled.append((graph, original))


def _leave_compiled_code() -> None:
    while _compiled:
        graph, original = _compiled.pop()
        graph.__call__ = original
