"""Links of chosen bandwidth between processes of one machine.

Messages are real, and count as arrived when a link of that bandwidth and latency would have delivered them. Adjacent
ranks may share a host, within which another rate holds; each rank has a link of its own.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

_EXCHANGE = "all_to_all_single"


class Delays:
    """Links of this process, one to its host's ranks and one to other hosts.

    `enter` wraps the tensor collectives and point-to-point messages of `torch.distributed` for the whole process.
    """

    def __init__(self, megabits: float | None = None, latency: float = 0.0, ranks_per_host: int = 1) -> None:
        self._between, self._within = _ClockLink(megabits, latency), _ClockLink(None, latency)
        self._ranks_per_host = ranks_per_host

    def set_rate(self, megabits: float | None, within: float | None = None) -> None:
        """Set Mbit/s between hosts and within one, from now on; None is unlimited."""
        self._between.megabits, self._within.megabits = megabits, within

    def enter(self) -> None:
        """Call it before a process group is initialized."""
        for name in (_EXCHANGE, "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
            setattr(dist, name, self._around(name, getattr(dist, name)))
        isend = self._around_isend(dist.isend)
        # batch_isend_irecv compares by identity with the names of the module that defines it.
        dist.isend = dist.distributed_c10d.isend = isend
        dist.send = functools.wraps(dist.send)(lambda *args, **kwargs: isend(*args, **kwargs).wait())

    def _around(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            if self._between.megabits is None and self._within.megabits is None:
                return original(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            nonblocking = given.pop("async_op", False)
            ranks = dist.get_process_group_ranks(given.get("group"))
            sent = sent_to_each(name, given, len(ranks))
            others = [(peer, size) for peer, size in zip(ranks, sent, strict=True) if peer != dist.get_rank()]
            if name == _EXCHANGE:
                arrives = max((self._link(peer).send(size) for peer, size in others), default=0.0)
            else:
                # In a ring of these ranks all bytes cross every link, including the slowest.
                slowest = max(map(self._link, ranks), key=lambda link: link is self._between)
                arrives = slowest.send(sum(size for _, size in others))
            if dist.distributed_c10d._world.pg_coalesce_state:
                # The coalescing manager issues it later and waits for it itself.
                time.sleep(max(0.0, arrives - time.perf_counter()))
                return original(**given, async_op=nonblocking)
            handle = _Delayed(original(**given, async_op=True), arrives)
            if nonblocking:
                return handle
            handle.wait()
            return None

        return collective

    def _around_isend(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def isend(tensor: torch.Tensor, dst: int | None = None, group: Any = None, *args: Any, **kwargs: Any) -> Any:
            peer = dist.get_process_group_ranks(group)[kwargs["group_dst"]] if dst is None else dst
            run = functools.partial(original, tensor, dst, group, *args, **kwargs)
            return self._link(peer).deliver(run, _bytes(tensor))

        return isend

    def _link(self, peer: int) -> _ClockLink:
        is_near = peer // self._ranks_per_host == dist.get_rank() // self._ranks_per_host
        return self._within if is_near else self._between


class _ClockLink:
    """A link over which one process sends."""

    def __init__(self, megabits: float | None, latency: float) -> None:
        self.megabits, self._latency, self._free = megabits, latency, 0.0
        self._turns: ThreadPoolExecutor | None = None

    def send(self, size: int) -> float:
        """Arrival time of a message of `size` bytes sent now."""
        if self.megabits is None or not size:
            return 0.0
        self._free = max(self._free, time.perf_counter()) + size * 8 / (self.megabits * 1e6)
        return self._free + self._latency

    def deliver(self, run: Callable[[], Any], size: int) -> Any:
        """Send a message at its arrival time, since its receiver waits in another process."""
        if self.megabits is None:
            return run()
        if self._turns is None:
            self._turns = ThreadPoolExecutor(1)

        def send(arrives: float) -> Any:
            time.sleep(max(0.0, arrives - time.perf_counter()))
            return run()

        return _Queued(self._turns.submit(send, self.send(size)))


class _Delayed:
    def __init__(self, handle: Any, arrives: float) -> None:
        self._handle, self._arrives = handle, arrives

    def wait(self, *args: Any) -> Any:
        result = self._handle.wait(*args)
        time.sleep(max(0.0, self._arrives - time.perf_counter()))
        return result


class _Queued:
    def __init__(self, handle: Future[Any]) -> None:
        self._handle = handle

    def wait(self, *args: Any) -> Any:
        return self._handle.result().wait(*args)

    def is_completed(self) -> bool:
        return self._handle.done() and self._handle.result().is_completed()


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def sent_to_each(name: str, given: Mapping[str, Any], ranks: int) -> list[int]:
    """Bytes that a collective with these arguments has for each rank, its own included; [] if unknown."""
    if name == _EXCHANGE:
        x, splits = given["input"], given.get("input_split_sizes")
        row = _bytes(x) // max(1, len(x))
        return [
            row * int(rows) for rows in ([len(x) // ranks] * ranks if splits is None or not len(splits) else splits)
        ]
    if name in ("all_gather", "all_gather_into_tensor", "_all_gather_base"):
        return [_bytes(given["tensor" if name == "all_gather" else "input_tensor"])] * ranks
    if name == "reduce_scatter":
        return [_bytes(each) for each in given["input_list"]]
    if name in ("reduce_scatter_tensor", "_reduce_scatter_base"):
        return [_bytes(given["output"])] * ranks
    if name == "all_reduce":
        return [2 * _bytes(given["tensor"]) // ranks] * ranks
    return []
