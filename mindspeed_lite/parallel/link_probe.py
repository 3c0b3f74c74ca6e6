"""Measures links between all ranks, process groups, and each rank's computation; collectives of the whole world.

Ranks of a host meet in rounds, then each host meets another with all its ranks, so that links between hosts are always
shared by equally many pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_lite.platform.timer import seconds_of

from .groups import new_groups

# Ranks of which all pairs meet; of more, a rank meets one of each other host.
ALL_PAIRS = 64
_PINGS, _REPEATS, _PRODUCTS = 50, 5, 32
# A message takes about so many seconds, within these bytes.
_SECONDS, _LEAST, _MOST = 0.08, 1 << 16, 1 << 26
# Sides of the products that are timed, on a CPU and on others.
_SIDES = {"cpu": 512}
_SIDE = 4096


def rounds(hosts: Sequence[str]) -> Iterator[list[int]]:
    """Peer of each rank in each round, itself if it has none; each pair of ranks meets at most once."""
    places: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        places.setdefault(host, []).append(rank)
    blocks, ranks = [*places.values()], len(hosts)
    count = len(blocks[0])
    if any(len(each) != count for each in blocks):
        blocks, count = [[rank] for rank in range(ranks)], 1
    for pairs in _tournament(count):
        yield _peers(ranks, [(block[i], block[j]) for block in blocks for i, j in pairs])
    for pairs in _tournament(len(blocks)):
        for shift in range(count if ranks <= ALL_PAIRS else 1):
            met = [(blocks[i][n], blocks[j][(n + shift) % count]) for i, j in pairs for n in range(count)]
            yield _peers(ranks, met)


def _tournament(players: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds in which each meets each other once (the circle method)."""
    count = players + players % 2
    for turn in range(count - 1 if players > 1 else 0):
        circle = [0, *((turn + each) % (count - 1) + 1 for each in range(count - 1))]
        yield [pair for pair in zip(circle[: count // 2], circle[: count // 2 - 1 : -1], strict=True)
               if max(pair) < players]  # fmt: skip


def _peers(ranks: int, pairs: Sequence[tuple[int, int]]) -> list[int]:
    found = [*range(ranks)]
    for i, j in pairs:
        found[i], found[j] = j, i
    return found


def _fast(seconds: Sequence[float]) -> float:
    """First quartile, since other load only lengthens measurements."""
    return sorted(seconds)[len(seconds) // 4]


def host_names(hosts: Sequence[tuple[str, str]]) -> list[str]:
    """Host name of each rank, from (name, machine); machines with the same name get a number."""
    machines: dict[str, list[str]] = {}
    for name, machine in dict.fromkeys(hosts):
        machines.setdefault(name, []).append(machine)
    return [f"{name}({machines[name].index(machine)})" if len(machines[name]) > 1 else name for name, machine in hosts]


def _machine() -> str:
    """Differs between machines, also where containers have the same host name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""


class LinkProbe:
    """Probes of this rank on `host`, whose tensors are on `device`."""

    def __init__(self, host: str, device: torch.device) -> None:
        self.device, self.rank, self.ranks = device, dist.get_rank(), dist.get_world_size()
        self._world: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
        self._ack = torch.zeros(1, dtype=torch.uint8, device=device)
        self.hosts = host_names(self._gathered((host, _machine())))

    def pairs(self, tell: Callable[[int, int, str], None]) -> tuple[list[list[float]], list[list[float]]]:
        """(bytes/s, seconds of an empty message) from each rank (row) to another."""
        bandwidth, latency = [0.0] * self.ranks, [0.0] * self.ranks
        all_rounds = [*rounds(self.hosts)]
        for number, peers in enumerate(all_rounds):
            tell(number, len(all_rounds), "pairs of ranks")
            peer = peers[self.rank]
            for sender in (min(self.rank, peer), max(self.rank, peer)):
                # All pairs start at once, so that those that share a link do so evenly.
                dist.barrier()
                found = self._latency(peer, sender) if peer != self.rank else 0.0
                dist.barrier()
                size = self._size(peer, sender, found) if peer != self.rank else 0
                dist.barrier()
                speed = self._speed(peer, sender, found, size, _REPEATS) if peer != self.rank else 0.0
                if sender == self.rank:
                    bandwidth[peer], latency[peer] = speed, found
        return self._filled(self._gathered(bandwidth)), self._filled(self._gathered(latency))

    def group_rate(self, kind: str, size: int, stride: int, sent: float, slowest: float) -> float:
        """Bytes/s that a rank of the slowest group sends; all groups of this size and stride at once.

        sent: bytes that a rank sends for each of a tensor. slowest: bytes/s of the slowest link, for the size.
        """
        first = self.rank - self.rank // stride % size * stride
        (group,) = new_groups(self._world, [*range(first, first + size * stride, stride)])
        count = int(min(_MOST, max(_LEAST, _SECONDS * slowest))) // (4 * size)
        whole, part = torch.zeros(count * size, device=self.device), torch.zeros(count, device=self.device)
        run = {
            "all_reduce": partial(dist.all_reduce, whole, group=group),
            "all_gather": partial(dist.all_gather_into_tensor, whole, part, group=group),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole, group=group),
            "all_to_all": partial(dist.all_to_all_single, torch.empty_like(whole), whole, group=group),
        }[kind]
        run()
        times = []
        for _ in range(_REPEATS):
            dist.barrier()
            times.append(seconds_of(run, self.device))
        seconds: list[float] = self._gathered(_fast(times))
        dist.destroy_process_group(group)
        return sent * whole.numel() * whole.itemsize / max(seconds)

    def compute(self) -> list[float]:
        """Seconds of the same matrix product on each rank, on all at once."""
        side = _SIDES.get(self.device.type, _SIDE)
        x = torch.ones(side, side, dtype=torch.float32 if self.device.type == "cpu" else torch.bfloat16,
                       device=self.device)  # fmt: skip
        times = []
        for _ in range(_PRODUCTS):
            dist.barrier()
            times.append(seconds_of(lambda: x @ x, self.device))
        return self._gathered(median(times))  # also slow now and then is slow

    def _latency(self, peer: int, sender: int) -> float:
        """Seconds of an empty message: the fastest, since slower ones are delayed by the hosts."""
        return min(self._round_trips(self._ack, peer, sender, _PINGS)) / 2

    def _speed(self, peer: int, sender: int, latency: float, size: int, repeats: int) -> float:
        """Bytes/s of messages of `size` bytes."""
        message = torch.zeros(size, dtype=torch.uint8, device=self.device)
        seconds = _fast(self._round_trips(message, peer, sender, repeats))
        return size / max(seconds - 2 * latency, seconds / 10)

    def _size(self, peer: int, sender: int, latency: float) -> int:
        """Bytes that take `_SECONDS`; the sender decides."""
        speed = self._speed(peer, sender, latency, _LEAST, 1)
        size = torch.tensor([int(min(_MOST, max(_LEAST, _SECONDS * speed)))], device=self.device)
        (dist.send if sender == self.rank else dist.recv)(size, peer)
        return int(size)

    def _round_trips(self, message: torch.Tensor, peer: int, sender: int, repeats: int) -> list[float]:
        """Seconds of a message of `sender` and its acknowledgement, on both ends."""
        first, answer = (dist.send, dist.recv) if sender == self.rank else (dist.recv, dist.send)

        def trip() -> None:
            first(message, peer)
            answer(self._ack, peer)

        return [seconds_of(trip, self.device) for _ in range(repeats)]

    def _filled(self, matrix: list[list[float]]) -> list[list[float]]:
        """A pair that did not meet is like the others of its hosts."""
        known: dict[tuple[str, str], list[float]] = {}
        for i, j in itertools.permutations(range(self.ranks), 2):
            if matrix[i][j]:
                known.setdefault((self.hosts[i], self.hosts[j]), []).append(matrix[i][j])
        usual = {pair: median(values) for pair, values in known.items()}
        for i, j in itertools.permutations(range(self.ranks), 2):
            matrix[i][j] = matrix[i][j] or usual[self.hosts[i], self.hosts[j]]
        return matrix

    def _gathered(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value)
        return found
