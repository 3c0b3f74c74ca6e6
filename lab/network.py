"""Processes of one machine joined by links of chosen bandwidth.

`Namespaces` puts each host's processes into a network namespace, joined by a bridge; a token bucket limits the bytes
that leave a host (Linux, root, `ip` and `tc` of iproute2). `Delays` needs nothing: real messages, which count as
arrived when a link of that bandwidth and latency would have delivered them. `laboratory` takes the first that works.

Adjacent ranks may share a host, within which another rate holds. Ranks of a host share its link in `Namespaces`; each
rank has its own in `Delays`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

_EXCHANGE = "all_to_all_single"
_INTERFACE = "lab0"
_NAMES = Path("/run/netns")
# Token bucket and its queue, in bytes. A large bucket lets short messages through at once; a packet larger than the
# bucket is cut into frames of 1500 bytes, which costs the cores that compute more than the link's own time.
_BURST = 72 * 1024
_REFILL = 1e-3
_QUEUE = 4 * 1024 * 1024
_FRAME = 65000


class Network(Protocol):
    """Links between the processes of one group."""

    def enter(self, rank: int) -> None:
        """Join as `rank`, before it joins a process group."""
        ...

    def set_rate(self, megabits: float | None, within: float | None = None) -> None:
        """Set Mbit/s between hosts and within one, from now on; None is unlimited."""
        ...


def why_no_namespaces() -> str | None:
    """Why `Namespaces` cannot be used here, or None if it can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"no {' and no '.join(missing)} on the path (Debian: iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Namespaces(2) as tried:
            tried.set_rate(100)
    except OSError as error:
        return str(error)
    return None


class Namespaces:
    """Hosts of `ranks_per_host` ranks on one bridge, made and changed by the process that starts the ranks.

    Another process may `add` a host to a bridge by its `name`; leaving the block removes it with the rest.
    Raises OSError with the command and its message.
    """

    def __init__(self, ranks: int, name: str = "", ranks_per_host: int = 1) -> None:
        self.hosts = -(-ranks // ranks_per_host)
        self.ranks_per_host = ranks_per_host
        self.name = name or f"mslite-{uuid.uuid4().hex[:6]}"

    def __enter__(self) -> Namespaces:
        try:
            self._build()
        except OSError:
            self.__exit__()
            raise
        return self

    def _build(self) -> None:
        bridge = self._host("b")
        _run("ip", "netns", "add", bridge)
        _run("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "br0", "up")
        for number in range(self.hosts):
            self.add(number)

    def add(self, number: int) -> None:
        """Add a host, without a limit."""
        bridge, host, port = self._host("b"), self._host(number), f"port{number}"
        _run("ip", "netns", "add", host)
        _run("ip", "link", "add", port, "netns", bridge, "type", "veth", "peer", "name", _INTERFACE, "netns", host)
        _run("ip", "-n", bridge, "link", "set", port, "mtu", str(_FRAME))
        _run("ip", "-n", host, "link", "set", _INTERFACE, "mtu", str(_FRAME))
        _run("ip", "-n", bridge, "link", "set", port, "master", "br0", "up")
        _run("ip", "-n", host, "addr", "add", f"10.77.{number // 250}.{number % 250 + 1}/16", "dev", _INTERFACE)
        _run("ip", "-n", host, "link", "set", _INTERFACE, "up")
        _run("ip", "-n", host, "link", "set", "lo", "up")

    def __exit__(self, *_: object) -> None:
        for path in sorted(_NAMES.glob(f"{self.name}-*")):
            with contextlib.suppress(OSError):
                _run("ip", "netns", "del", path.name)

    def _host(self, number: int | str) -> str:
        return f"{self.name}-{number}"

    def enter(self, rank: int) -> None:
        with (_NAMES / self._host(rank // self.ranks_per_host)).open() as namespace:
            os.setns(namespace.fileno(), os.CLONE_NEWNET)
        os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE

    def set_rate(self, megabits: float | None, within: float | None = None) -> None:
        for number in range(self.hosts):
            self.set_rate_of(number, megabits, within)

    def set_rate_of(self, number: int, megabits: float | None, within: float | None = None) -> None:
        """Set the rates of one host."""
        # Messages within a host go over its loopback, whatever address they use.
        for interface, rate in ((_INTERFACE, megabits), ("lo", within)):
            place = ("-n", self._host(number), "qdisc")
            if rate is None:
                with contextlib.suppress(OSError):  # there may be none
                    _run("tc", *place, "del", "dev", interface, "root")
                continue
            burst = max(_BURST, round(rate * 1e6 / 8 * _REFILL))
            bucket = ("burst", str(burst), "limit", str(_QUEUE))
            _run("tc", *place, "replace", "dev", interface, "root", "tbf", "rate", f"{rate}mbit", *bucket)


class Delays:
    """Links modelled by delays: each process has one to its host's ranks and one to other hosts.

    `enter` wraps the tensor collectives and point-to-point messages of `torch.distributed` for the whole process.
    """

    def __init__(self, megabits: float | None = None, latency: float = 0.0, ranks_per_host: int = 1) -> None:
        self._between, self._within = _ClockLink(megabits, latency), _ClockLink(None, latency)
        self._ranks_per_host = ranks_per_host

    def set_rate(self, megabits: float | None, within: float | None = None) -> None:
        self._between.megabits, self._within.megabits = megabits, within

    def enter(self, rank: int) -> None:
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


@contextlib.contextmanager
def laboratory(ranks: int, ranks_per_host: int = 1) -> Iterator[Network]:
    """Links between `ranks` processes: in the kernel where they can be."""
    if why_no_namespaces() is not None:
        yield Delays(ranks_per_host=ranks_per_host)
        return
    with Namespaces(ranks, ranks_per_host=ranks_per_host) as made:
        yield made


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"`{' '.join(command)}`: {done.stderr.strip() or done.stdout.strip()}")
