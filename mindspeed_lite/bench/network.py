"""A network laboratory: processes of one machine joined by links of chosen bandwidth, to see communication hide.

`Namespaces` puts each process into a network namespace of its own, all joined by a bridge; a token bucket at each
process's end lets that many bytes a second leave (Linux, root, `ip` and `tc` of iproute2). Bytes then take their time
in the kernel, beside whatever the processor computes, and gloo's threads share the cores as they do in earnest.
`Delays` needs nothing: collectives are the real ones, and their results count as arrived when a link of that
bandwidth and latency would have brought them. `laboratory` takes the first that works here.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

_INTERFACE = "lab0"
# What a token bucket lets through at once, and what may wait before it, in bytes. A packet larger than the bucket is
# cut into frames, and 64 KiB in frames of 1500 bytes cost the cores that compute more than the link's own time.
_BURST = 256 * 1024
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

    `set_rate` may be called at any time by the process that made it, and holds for all hosts.
    Raises OSError with the command and its message where the kernel or its limits refuse.
    """

    kind = "namespaces"

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._name = f"mslite-{uuid.uuid4().hex[:6]}"

    def __enter__(self) -> Namespaces:
        try:
            self._build()
        except OSError:
            self.__exit__()
            raise
        return self

    def _build(self) -> None:
        bridge = f"{self._name}-b"
        _run("ip", "netns", "add", bridge)
        _run("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "br0", "up")
        for rank in range(self.ranks):
            host, port = self._host(rank), f"port{rank}"
            _run("ip", "netns", "add", host)
            _run("ip", "link", "add", port, "netns", bridge, "type", "veth", "peer", "name", _INTERFACE, "netns", host)
            _run("ip", "-n", bridge, "link", "set", port, "mtu", str(_FRAME))
            _run("ip", "-n", host, "link", "set", _INTERFACE, "mtu", str(_FRAME))
            _run("ip", "-n", bridge, "link", "set", port, "master", "br0", "up")
            _run("ip", "-n", host, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", _INTERFACE)
            _run("ip", "-n", host, "link", "set", _INTERFACE, "up")
            _run("ip", "-n", host, "link", "set", "lo", "up")

    def __exit__(self, *_: object) -> None:
        for name in (*(self._host(rank) for rank in range(self.ranks)), f"{self._name}-b"):
            with contextlib.suppress(OSError):
                _run("ip", "netns", "del", name)

    def _host(self, rank: int) -> str:
        return f"{self._name}-{rank}"

    def enter(self, rank: int) -> None:
        with (Path("/run/netns") / self._host(rank)).open() as namespace:
            os.setns(namespace.fileno(), os.CLONE_NEWNET)
        os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE

    def set_rate(self, megabits: float | None) -> None:
        for rank in range(self.ranks):
            place = ("-n", self._host(rank), "qdisc")
            if megabits is None:
                with contextlib.suppress(OSError):  # there may be none
                    _run("tc", *place, "del", "dev", _INTERFACE, "root")
                continue
            bucket = ("burst", str(_BURST), "limit", str(_QUEUE))
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


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"`{' '.join(command)}`: {done.stderr.strip() or done.stdout.strip()}")
