"""A network laboratory: processes of one machine joined by links of chosen bandwidth, to see communication hide.

`Namespaces` puts each host's processes into a network namespace of its own, all joined by a bridge; a token bucket at
each host's end lets that many bytes a second leave (Linux, root, `ip` and `tc` of iproute2). Bytes then take their time
in the kernel, beside whatever the processor computes, and gloo's threads share the cores as they do in earnest.
`Delays` needs nothing: messages are the real ones, and count as arrived when a link of that bandwidth and latency
would have brought them. `laboratory` takes the first that works here.

Links have two tiers where hosts have several ranks: adjacent ranks share a host, and within it another rate holds. In
the kernel the ranks of a host share its link to the others; in the clock each rank has a link of its own.

`Links` is the same for a training that others start: its processes join one by one, when they meet (`join`).
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

_INTERFACE = "lab0"
_NAMES = Path("/run/netns")
# What a token bucket lets through at once, and what may wait before it, in bytes. It must be small, or short messages
# take no time. But a packet larger than the bucket is cut into frames, and 64 KiB in frames of 1500 bytes cost the
# cores that compute more than the link's own time; nor may it fill sooner than the kernel looks at it.
_BURST = 72 * 1024
_REFILL = 1e-3
_QUEUE = 4 * 1024 * 1024
_FRAME = 65000


class Network(Protocol):
    """Links between the processes of one group."""

    kind: str

    def enter(self, rank: int) -> None:
        """Called in the process of `rank` before it joins a process group."""
        ...

    def set_rate(self, megabits: float | None, within: float | None = None) -> None:
        """Megabits a second that leave each host, and those within it, from now on; None is as fast as it goes."""
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
    """Hosts of `ranks_per_host` ranks on one bridge; made and changed by the process that starts the others.

    `set_rate` may be called at any time by the process that made it, and holds for all hosts. A process that knows its
    `name` may `add` a host of its own to a bridge that another one made, which takes it away with the rest.
    Raises OSError with the command and its message where the kernel or its limits refuse.
    """

    kind = "namespaces"

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
        """One more host, as fast as it goes."""
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
        """As `set_rate`, for one host."""
        # What a host's ranks send each other goes over its loopback, whatever address they use.
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
    """Links that exist in the clock alone: each process has two, over which its messages leave in turn.

    One leads to the other ranks of its host, one to other hosts. Reaches `torch.distributed`'s collectives over
    tensors and its point-to-point messages when `enter` is called, for the whole process.
    """

    kind = "delays"

    def __init__(self, megabits: float | None = None, latency: float = 0.0, ranks_per_host: int = 1) -> None:
        self._between, self._within = _ClockLink(megabits, latency), _ClockLink(None, latency)
        self._ranks_per_host = ranks_per_host

    def set_rate(self, megabits: float | None, within: float | None = None) -> None:
        self._between.megabits, self._within.megabits = megabits, within

    def enter(self, rank: int) -> None:
        for name, leaving in _LEAVING.items():
            setattr(dist, name, self._around(getattr(dist, name), leaving))
        exchange = dist.all_to_all_single
        dist.all_to_all_single = self._around(exchange, None)
        isend = self._around_isend(dist.isend)
        # batch_isend_irecv compares by identity with the names of the module that defines it.
        dist.isend = dist.distributed_c10d.isend = isend
        dist.send = functools.wraps(dist.send)(lambda *args, **kwargs: isend(*args, **kwargs).wait())

    def _around(
        self, original: Callable[..., Any], leaving: Callable[[Any, Any, int], int] | None
    ) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            nonblocking = given.pop("async_op", False)
            ranks = dist.get_process_group_ranks(given.get("group"))
            if leaving is None:
                sent = sent_to_each("all_to_all_single", given, len(ranks))
                others = [(peer, size) for peer, size in zip(ranks, sent, strict=True) if peer != dist.get_rank()]
                arrives = max((self._link(peer).send(size) for peer, size in others), default=0.0)
            else:
                # Around a ring of these ranks all bytes cross every link, the slowest one too.
                slowest = max(map(self._link, ranks), key=lambda link: link is self._between)
                first, second = [*given.values(), None][:2]
                arrives = slowest.send(leaving(first, second, len(ranks)))
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
    """One link that one process sends over."""

    def __init__(self, megabits: float | None, latency: float) -> None:
        self.megabits, self._latency, self._free = megabits, latency, 0.0
        self._turns: ThreadPoolExecutor | None = None

    def send(self, size: int) -> float:
        """When a message of `size` bytes that is sent now has arrived."""
        if self.megabits is None or not size:
            return 0.0
        self._free = max(self._free, time.perf_counter()) + size * 8 / (self.megabits * 1e6)
        return self._free + self._latency

    def deliver(self, run: Callable[[], Any], size: int) -> Any:
        """Send a message at the time of its arrival: its receiver, another process, waits for it itself."""
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
    """Bytes that a collective has for each rank of its group, this one's own among them; [] where that is not known.

    given: its arguments by name.
    """
    if name == "all_to_all_single":
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
    return []


# Bytes that leave each of p ranks where nothing is sent twice.
_LEAVING: dict[str, Callable[[Any, Any, int], int]] = {
    "all_gather_into_tensor": lambda out, x, ranks: _bytes(x) * (ranks - 1),
    "reduce_scatter_tensor": lambda out, x, ranks: _bytes(out) * (ranks - 1),
    "all_reduce": lambda x, _, ranks: 2 * _bytes(x) * (ranks - 1) // ranks,
}


@contextlib.contextmanager
def laboratory(ranks: int, ranks_per_host: int = 1) -> Iterator[tuple[Network, str | None]]:
    """Links between `ranks` processes, and why they are only modelled, if they are."""
    reason = why_no_namespaces()
    if reason is not None:
        yield Delays(ranks_per_host=ranks_per_host), reason
        return
    with Namespaces(ranks, ranks_per_host=ranks_per_host) as made:
        yield made, None


@dataclass(frozen=True)
class Links:
    """Links between the processes of a training.

    Attributes:
        megabits: a second, that leave each host.
        modelled: why they exist in the clock alone; None where they are in the kernel.
        within: megabits a second within a host; None is as fast as it goes.
        ranks_per_host: adjacent ranks that share a host.
    """

    megabits: float
    modelled: str | None
    within: float | None = None
    ranks_per_host: int = 1

    @classmethod
    def of(cls, megabits: float, within: float | None = None, ranks_per_host: int = 1) -> Links:
        """In the kernel if it can be."""
        return cls(megabits, why_no_namespaces(), within, ranks_per_host)

    def __str__(self) -> str:
        how = "network namespaces" if self.modelled is None else f"modelled ({self.modelled})"
        if self.ranks_per_host == 1:
            return how
        speed = "" if self.within is None else f", {self.within:g} Mbit/s within it"
        return f"{how}; {self.ranks_per_host} ranks to a host{speed}"

    @contextlib.contextmanager
    def opened(self) -> Iterator[str]:
        """The name by which processes `join` within the block; empty where there is nothing to be made for them."""
        if self.modelled is not None:
            yield ""
            return
        with Namespaces(0) as bridge:
            yield bridge.name


def join(megabits: float, name: str, within: float | None = None, ranks_per_host: int = 1) -> None:
    """In a process of a training, before anyone takes collectives by value: join when its ranks meet.

    They meet where they would have met, outside: a namespace has no way to a store. What is connected stays so, and
    every connection from then on goes over the link. SystemExit where there is one process alone.
    """
    original = dist.init_process_group
    if not name:
        delays = Delays(ranks_per_host=ranks_per_host)
        delays.set_rate(megabits, within)
        delays.enter(0)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        given = inspect.signature(original).bind(*args, **kwargs)
        given.apply_defaults()
        found = given.arguments
        if found["store"] is None:
            method = found["init_method"] or "env://"
            found["init_method"] = None
            met = rendezvous(method, found["rank"], found["world_size"])
            found["store"], found["rank"], found["world_size"] = next(iter(met))
        if found["world_size"] < 2:
            raise SystemExit("mindspeed-lite bench: --link-rate joins processes, and this training has one.")
        if name:
            hosts = Namespaces(0, name, ranks_per_host)
            number, place = divmod(found["rank"], ranks_per_host)
            ready = f"mindspeed_lite/host/{number}"
            if place == 0:
                hosts.add(number)
                hosts.set_rate_of(number, megabits, within)
                found["store"].set(ready, "1")
            found["store"].wait([ready])
            hosts.enter(found["rank"])
        original(*given.args, **given.kwargs)

    dist.init_process_group = init_process_group


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"`{' '.join(command)}`: {done.stderr.strip() or done.stdout.strip()}")
