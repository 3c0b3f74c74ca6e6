"""Records what code issues to streams, without a device, other processes or values, and runs it on hardware queues.

Tensors are on the meta device, or on the CPU and never computed. Operators, copies and collectives take the time of an
H100 node. PyTorch's CUDA sanitizer checks every access. Memory that is freed counts as written by the stream that
allocated it, when that stream next allocates: what another stream still does with it is a race, as with the caching
allocator.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda._sanitizer import EventHandler
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lab import lanes
from lab.lanes import storage_id

# An H100 node: matrix products per second, and bytes per second of memory, links between its GPUs and the host.
FLOPS, MEMORY, LINK, HOST = 600e12, 3.0e12, 300e9, 50e9
COMPUTE, MESSAGES, TO_HOST, FROM_HOST = "compute", "messages", "copies to the host", "copies from the host"
# Link passes of the larger side's bytes.
_COLLECTIVES = {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1, "all_to_all_single": 1, "all_reduce": 2}
_ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
_VIEWS = ("detach", "alias", "_unsafe_view", "set_", "_reshape_alias")


class Op(NamedTuple):
    """Work of a stream. waits: numbers of ops that end before it starts."""

    stream: int
    name: str
    unit: str = ""
    seconds: float = 0.0
    waits: tuple[int, ...] = ()


class Times(NamedTuple):
    """Seconds of a schedule: until its last op ends, and of what runs on each unit."""

    total: float
    units: dict[str, float]

    @property
    def hidden(self) -> float:
        """Share of messages and copies that overlaps with compute or with each other."""
        others = sum(seconds for unit, seconds in self.units.items() if unit != COMPUTE)
        return 1 - (self.total - self.units.get(COMPUTE, 0.0)) / others


def simulate(ops: Sequence[Op], connections: int) -> Times:
    """Run ops on hardware queues, one per connection and direction of copies; streams are mapped to them in turn.

    A queue starts its ops in the order of issue: one that must wait holds up all after it, of any stream. A unit runs
    one op at a time. The host is always ahead.
    """
    copies = {op.stream: op.unit for op in ops if op.unit in (TO_HOST, FROM_HOST)}
    queues: dict[Any, deque[int]] = {}
    before: dict[int, int] = {}
    needs: list[list[int]] = []
    for number, op in enumerate(ops):
        queues.setdefault((op.stream % connections, copies.get(op.stream)), deque()).append(number)
        needs.append([*op.waits, *([before[op.stream]] if op.stream in before else [])])
        before[op.stream] = number
    ends: dict[int, float] = {}
    free: dict[str, float] = {}
    started = dict.fromkeys(queues, 0.0)
    while any(queues.values()):
        heads = []
        for place, queue in queues.items():
            if queue and all(each in ends for each in needs[queue[0]]):
                begins = [started[place], free.get(ops[queue[0]].unit, 0.0), *(ends[each] for each in needs[queue[0]])]
                heads.append((max(begins), queue[0], place))
        start, number, place = min(heads, key=lambda head: head[:2])
        queues[place].popleft()
        started[place] = start
        ends[number] = start + ops[number].seconds
        if ops[number].unit:
            free[ops[number].unit] = ends[number]
    units: dict[str, float] = {}
    for op in ops:
        if op.unit:
            units[op.unit] = units.get(op.unit, 0.0) + op.seconds
    return Times(max(ends.values(), default=0.0), units)


class Event(NamedTuple):
    """After the last op of a stream; -1: it had none."""

    number: int
    op: int

    def query(self) -> bool:
        return False


class Stream:
    def __init__(self, recorder: Recorder, device: Any = None) -> None:
        self._recorder = recorder
        self.number = len(recorder.streams)
        self.last = -1
        recorder.streams.append(self)

    def record_event(self) -> Event:
        event = Event(next(self._recorder.numbers), self.last)
        self._recorder.handler.syncs.record_state(event.number, self.number)
        return event

    def wait_event(self, event: Event) -> None:
        self._recorder.handler.syncs.stream_wait_for_event(self.number, event.number)
        is_done = event.op < 0 or event.number < self._recorder.first
        self._recorder.add(self, Op(self.number, "wait", waits=() if is_done else (event.op,)))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def __enter__(self) -> None:
        self._recorder.entered.append(self)

    def __exit__(self, *_: object) -> None:
        self._recorder.entered.pop()


class _Work:
    """A collective's handle; keeps its tensors until the wait, as ProcessGroupNCCL does."""

    def __init__(self, recorder: Recorder, event: Event, tensors: Sequence[Tensor]) -> None:
        self._recorder, self._event, self._tensors = recorder, event, tensors

    def wait(self, *_: Any) -> bool:
        self._recorder.current.wait_event(self._event)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return False


class Recorder(TorchDispatchMode):
    """Attributes: ops, in order of issue; errors of the sanitizer."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []
        self.errors: list[str] = []
        self.handler = EventHandler()
        self.numbers = itertools.count()
        self.first = 0
        self.streams: list[Stream] = []
        self.entered = [Stream(self)]
        # Of groups, their own; of messages between two ranks by peer.
        self._of_group: dict[tuple[int, Any], Stream] = {}
        # Stream that allocated a storage, which may be freed by now.
        self._memory: dict[int, tuple[StorageWeakRef, Stream]] = {}
        # By storage, as `record_stream` says.
        self._users: dict[int, set[Stream]] = {}
        # By storage: bytes from and to, and their number in the sanitizer.
        self._ranges: dict[int, dict[tuple[int, int], int]] = {}
        self._host: set[int] = set()
        self._undo: list[Callable[[], None]] = []

    @property
    def current(self) -> Stream:
        return self.entered[-1]

    def pinned(self, nbytes: int) -> Tensor:
        """Host memory."""
        found = torch.empty(nbytes, dtype=torch.uint8)
        self._host.add(storage_id(found))
        return found

    def __enter__(self) -> Recorder:
        module = SimpleNamespace(
            Stream=functools.partial(Stream, self), stream=lambda stream: stream,
            current_stream=lambda device=None: self.current, synchronize=lambda device=None: None,
        )  # fmt: skip
        self.replace(torch, "get_device_module", lambda device=None: module)
        for name in _COLLECTIVES:
            self.replace(dist, name, functools.partial(self._collective, name))
        for name in ("broadcast", "reduce"):
            self.replace(dist, name, functools.partial(self._rooted, name))
        self.replace(dist, "isend", functools.partial(self._send_or_receive, "send"))
        self.replace(dist, "irecv", functools.partial(self._send_or_receive, "receive"))
        self.replace(dist, "P2POp", lambda op, tensor, peer, group: (op is dist.isend, tensor, group))
        self.replace(dist, "batch_isend_irecv", self._send_and_receive)
        self.replace(dist, "get_global_rank", lambda group, rank: rank)
        users = self._users
        self.replace(
            Tensor, "record_stream", lambda tensor, stream: users.setdefault(storage_id(tensor), set()).add(stream)
        )
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        while self._undo:
            self._undo.pop()()

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Until the recorder is left."""
        self._undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def forget(self) -> None:
        """Drop the ops so far; their events are done."""
        self.ops.clear()
        self.first = next(self.numbers)
        for each in self.streams:
            each.last = -1

    def add(self, stream: Stream, op: Op) -> None:
        stream.last = len(self.ops)
        self.ops.append(op)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given, writes = lanes.tensors_in((*args, *kwargs.values())), lanes.written(func, args, kwargs)
        out = _without_values(func, args, kwargs, given, bool(writes))
        name = func._overloadpacket._qualified_op_name.split("::")[1]
        results = lanes.tensors_in(out if isinstance(out, (list, tuple)) else (out,))
        if func.is_view or name in _VIEWS:
            return out
        new = [each for each in results if storage_id(each) not in {*map(storage_id, given)}]
        self._allocate(new)
        if name in _ALLOCATIONS:
            return out
        flops = flop_registry.get(func._overloadpacket)
        if self._host & {*map(storage_id, given)}:
            unit = TO_HOST if self._host & {*map(storage_id, writes)} else FROM_HOST
            seconds = max(each.nbytes for each in given) / HOST
        elif flops is None:
            unit, seconds = COMPUTE, sum({id(each): each.nbytes for each in (*given, *results)}.values()) / MEMORY
        else:
            unit, seconds = COMPUTE, flops(*args, **kwargs, out_val=out) / FLOPS
        self._issue(self.current, name, unit, seconds, given, (*writes, *new))
        return out

    def _issue(
        self, stream: Stream, name: str, unit: str, seconds: float, reads: Iterable[Tensor], writes: Iterable[Tensor]
    ) -> None:
        written = self._places(writes)
        self._check(stream.number, name, self._places(reads) - written, written)
        self.add(stream, Op(stream.number, name, unit, seconds))

    def _places(self, tensors: Iterable[Tensor]) -> set[int]:
        """Numbers of all ranges of memory that overlap with one of these tensors."""
        found = set()
        for each in tensors:
            first = int(each.storage_offset()) * each.itemsize
            length = int(sum((size - 1) * stride for size, stride in zip(each.shape, each.stride(), strict=True))) + 1
            end = first + length * each.itemsize if each.numel() else first
            ranges = self._ranges.setdefault(storage_id(each), {})
            if (first, end) not in ranges:
                ranges[first, end] = next(self.numbers)
            found |= {number for (start, stop), number in ranges.items() if start < end and first < stop}
        return found

    def _after(self, stream: Stream, users: set[Stream]) -> int:
        """A number that waits for these streams: freed memory waits for its users, but no stream does."""
        if not users:
            return stream.number
        found = next(self.numbers)
        self.handler.syncs.create_stream(found)
        for each in (stream, *users):
            event = next(self.numbers)
            self.handler.syncs.record_state(event, each.number)
            self.handler.syncs.stream_wait_for_event(found, event)
        return found

    def _check(self, stream: int, name: str, reads: set[int], writes: set[int]) -> None:
        aliases: dict[int, list[str]] = {each: [] for each in reads | writes}
        found = self.handler._handle_kernel_launch(stream, reads, writes, set(), name, aliases)
        for each in found:
            now, before = each.current_access, each.previous_access  # type: ignore[attr-defined]
            self.errors.append(
                f"{now.operator} on stream {now.stream} does not wait for {before.operator} on stream {before.stream}"
            )

    def _allocate(self, new: Iterable[Tensor]) -> None:
        new = list(new)
        if not new:
            return
        for key, (reference, stream) in [*self._memory.items()]:
            if stream is self.current and reference.expired():  # type: ignore[no-untyped-call]
                after = self._after(stream, self._users.pop(key, set()))
                self._check(after, "an allocation in freed memory", set(), {*self._ranges.pop(key, {}).values()})
                del self._memory[key]
        for each in new:
            self._memory[storage_id(each)] = (StorageWeakRef(each.untyped_storage()), self.current)  # type: ignore[no-untyped-call]

    def _message(
        self, name: str, group: Any, passes: float, reads: Sequence[Tensor], writes: Sequence[Tensor], peer: int = -1
    ) -> _Work:
        stream = self._of_group.get((peer, group))
        if stream is None:
            stream = self._of_group[peer, group] = Stream(self)
        stream.wait_stream(self.current)
        share = passes * (group.size() - 1) / group.size()
        nbytes = max(each.nbytes for each in (*reads, *writes))
        self._issue(stream, name, MESSAGES, share * nbytes / LINK, reads, writes)
        return _Work(self, stream.record_event(), (*reads, *writes))

    def _rooted(self, name: str, tensor: Tensor, root: int, group: Any, async_op: bool = False) -> Any:
        work = self._message(name, group, group.size() / (group.size() - 1), [], [tensor])
        return work if async_op else (work.wait(), None)[1]

    def _send_or_receive(self, name: str, tensor: Tensor, group: Any, **peer: int) -> Any:
        """Unbatched, they have a stream for each peer."""
        tensors = ([tensor], []) if name == "send" else ([], [tensor])
        return self._message(name, group, group.size() / (group.size() - 1), *tensors, *peer.values())

    def _collective(self, name: str, out: Tensor, *given: Any, group: Any, async_op: bool = False, **_: Any) -> Any:
        reads = lanes.tensors_in(given) or [out]
        work = self._message(name, group, _COLLECTIVES[name], reads, [out])
        return work if async_op else (work.wait(), None)[1]

    def _send_and_receive(self, operations: Sequence[Any]) -> list[_Work]:
        sent = [tensor for sends, tensor, _ in operations if sends]
        received = [tensor for sends, tensor, _ in operations if not sends]
        group = operations[0][2]
        return [self._message("send and receive", group, group.size() / (group.size() - 1), sent, received)]


def _without_values(func: Any, args: Any, kwargs: Any, given: Sequence[Tensor], writes: bool) -> Any:
    """The result; of CPU tensors uninitialised, where its shape is known."""
    if func.is_view or not any(each.device.type == "cpu" for each in given):
        return func(*args, **kwargs)
    if writes and lanes.returns_only_written(func):
        return lanes.returned(func, args, kwargs)
    found = lanes.empty_results(func, args, kwargs) if not writes and lanes.has_shapes(func) else None
    return func(*args, **kwargs) if found is None else found
