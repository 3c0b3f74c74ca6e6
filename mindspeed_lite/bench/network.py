"""A network laboratory: processes of one machine joined by links of chosen bandwidth, to see communication hide.

`Namespaces` puts each process into a network namespace of its own, all joined by a bridge; a token bucket at each
process's end lets that many bytes a second leave (Linux, root, `ip` and `tc` of iproute2). Bytes then take their time
in the kernel, beside whatever the processor computes, and gloo's threads share the cores as they do in earnest.
`Delays` needs nothing: collectives are the real ones, and their results count as arrived when a link of that
bandwidth and latency would have brought them. `laboratory` takes the first that works here.

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
from collections.abc import Callable, Iterator
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

    def set_rate(self, megabits: float | None) -> None:
        """Megabits a second that leave each process from now on; None is as fast as it goes."""
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
    """`ranks` hosts on one bridge; a context manager, made and changed by the process that starts the others.

    `set_rate` may be called at any time by the process that made it, and holds for all hosts. A process that knows its
    `name` may `add` a host of its own to a bridge that another one made, which takes it away with the rest.
    Raises OSError with the command and its message where the kernel or its limits refuse.
    """

    kind = "namespaces"

    def __init__(self, ranks: int, name: str = "") -> None:
        self.ranks = ranks
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
        for rank in range(self.ranks):
            self.add(rank)

    def add(self, rank: int) -> None:
        """One more host, as fast as it goes."""
        bridge, host, port = self._host("b"), self._host(rank), f"port{rank}"
        _run("ip", "netns", "add", host)
        _run("ip", "link", "add", port, "netns", bridge, "type", "veth", "peer", "name", _INTERFACE, "netns", host)
        _run("ip", "-n", bridge, "link", "set", port, "mtu", str(_FRAME))
        _run("ip", "-n", host, "link", "set", _INTERFACE, "mtu", str(_FRAME))
        _run("ip", "-n", bridge, "link", "set", port, "master", "br0", "up")
        _run("ip", "-n", host, "addr", "add", f"10.77.{rank // 250}.{rank % 250 + 1}/16", "dev", _INTERFACE)
        _run("ip", "-n", host, "link", "set", _INTERFACE, "up")
        _run("ip", "-n", host, "link", "set", "lo", "up")

    def __exit__(self, *_: object) -> None:
        for path in sorted(_NAMES.glob(f"{self.name}-*")):
            with contextlib.suppress(OSError):
                _run("ip", "netns", "del", path.name)

    def _host(self, rank: int | str) -> str:
        return f"{self.name}-{rank}"

    def enter(self, rank: int) -> None:
        with (_NAMES / self._host(rank)).open() as namespace:
            os.setns(namespace.fileno(), os.CLONE_NEWNET)
        os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE

    def set_rate(self, megabits: float | None) -> None:
        for rank in range(self.ranks):
            self.set_rate_of(rank, megabits)

    def set_rate_of(self, rank: int, megabits: float | None) -> None:
        """As `set_rate`, for one host."""
        place = ("-n", self._host(rank), "qdisc")
        if megabits is None:
            with contextlib.suppress(OSError):  # there may be none
                _run("tc", *place, "del", "dev", _INTERFACE, "root")
            return
        burst = max(_BURST, round(megabits * 1e6 / 8 * _REFILL))
        bucket = ("burst", str(burst), "limit", str(_QUEUE))
        _run("tc", *place, "replace", "dev", _INTERFACE, "root", "tbf", "rate", f"{megabits}mbit", *bucket)


class Delays:
    """Links that exist in the clock alone: each process has one, over which its messages leave in turn.

    Reaches `torch.distributed`'s collectives over tensors when `enter` is called, for the whole process.
    """

    kind = "delays"

    def __init__(self, megabits: float | None = None, latency: float = 0.0) -> None:
        self._megabits = megabits
        self._latency = latency
        self._free = 0.0

    def set_rate(self, megabits: float | None) -> None:
        self._megabits = megabits

    def enter(self, rank: int) -> None:
        for name, leaving in _LEAVING.items():
            setattr(dist, name, self._around(getattr(dist, name), leaving))

    def _around(self, original: Callable[..., Any], leaving: Callable[[Any, Any, int], int]) -> Callable[..., Any]:
        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            nonblocking = kwargs.pop("async_op", False)
            size = dist.get_world_size(kwargs.get("group"))
            arrives = self._send(leaving(args[0], args[1] if len(args) > 1 else None, size))
            handle = _Delayed(original(*args, **kwargs, async_op=True), arrives)
            if nonblocking:
                return handle
            handle.wait()
            return None

        return collective

    def _send(self, size: int) -> float:
        """When a message of `size` bytes that is sent now has arrived."""
        if self._megabits is None:
            return 0.0
        self._free = max(self._free, time.perf_counter()) + size * 8 / (self._megabits * 1e6)
        return self._free + self._latency


class _Delayed:
    def __init__(self, handle: Any, arrives: float) -> None:
        self._handle, self._arrives = handle, arrives

    def wait(self, *args: Any) -> Any:
        result = self._handle.wait(*args)
        time.sleep(max(0.0, self._arrives - time.perf_counter()))
        return result


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# Bytes that leave each of p ranks where nothing is sent twice.
_LEAVING: dict[str, Callable[[Any, Any, int], int]] = {
    "all_gather_into_tensor": lambda out, x, ranks: _bytes(x) * (ranks - 1),
    "reduce_scatter_tensor": lambda out, x, ranks: _bytes(out) * (ranks - 1),
    "all_reduce": lambda x, _, ranks: 2 * _bytes(x) * (ranks - 1) // ranks,
}


@contextlib.contextmanager
def laboratory(ranks: int) -> Iterator[tuple[Network, str | None]]:
    """Links between `ranks` processes, and why they are only modelled, if they are."""
    reason = why_no_namespaces()
    if reason is not None:
        yield Delays(), reason
        return
    with Namespaces(ranks) as made:
        yield made, None


@dataclass(frozen=True)
class Links:
    """Links between the processes of a training.

    Attributes:
        megabits: a second, that leave each process.
        modelled: why they exist in the clock alone; None where they are in the kernel.
    """

    megabits: float
    modelled: str | None

    @classmethod
    def of(cls, megabits: float) -> Links:
        """In the kernel if it can be."""
        return cls(megabits, why_no_namespaces())

    @contextlib.contextmanager
    def opened(self) -> Iterator[str]:
        """The name by which processes `join` within the block; empty where there is nothing to be made for them."""
        if self.modelled is not None:
            yield ""
            return
        with Namespaces(0) as bridge:
            yield bridge.name


def join(megabits: float, name: str) -> None:
    """In a process of a training, before anyone takes collectives by value: join when its ranks meet.

    They meet where they would have met, outside: a namespace has no way to a store. What is connected stays so, and
    every connection from then on goes over the link. SystemExit where there is one process alone.
    """
    original = dist.init_process_group
    if not name:
        Delays(megabits).enter(0)

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
            hosts = Namespaces(0, name)
            hosts.add(found["rank"])
            hosts.set_rate_of(found["rank"], megabits)
            hosts.enter(found["rank"])
        original(*given.args, **given.kwargs)

    dist.init_process_group = init_process_group


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"`{' '.join(command)}`: {done.stderr.strip() or done.stdout.strip()}")
