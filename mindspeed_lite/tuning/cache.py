"""Caches trial results for later runs on the same system.

One file per devices, ranks per host, backend, threads and versions; stale if a probe message's time changed much. Rank
0 broadcasts the result: all ranks must use the same chunk count.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_lite import json_file
from mindspeed_lite.platform import current
from mindspeed_lite.platform.cache import NoCache

_PROBE_BYTES = 1 << 20
_PROBE_ROUNDS = 8
_MAX_TIME_RATIO = 2.0
# Changes with what a trial measures.
_FORMAT = 1

_SECONDS = json_file.number("seconds", 1e-12, 1e6)
_FILE = json_file.fields(
    {
        "place": json_file.anything,
        "message_seconds": _SECONDS,
        "trials": json_file.table(
            json_file.table(json_file.rows(_SECONDS, least=1), r"[1-9]\d{0,6}", "a number of chunks"),
            r".+",
            "the name of a trial",
        ),
    }
)


class TuningCache:
    """Trials of one group in a file; created by all ranks together.

    Attributes:
        found: earlier results by trial name, the same on every rank.
        path: the file, on the group's first rank if there is a folder, else None.
    """

    def __init__(self, folder: Callable[[], Path], group: dist.ProcessGroup, device: torch.device) -> None:
        hosts: list[Any] = [None] * group.size()
        dist.all_gather_object(hosts, (socket.gethostname(), _of_this_rank(device)), group=group)
        self._place = {
            "backend": str(dist.get_backend(group)),
            # No host names: other allocations of the same machines share the file.
            "ranks": sorted(Counter(host for host, _ in hosts).values()),
            "devices": sorted({each for _, each in hosts}),
            "torch": torch.__version__,
            "made": _FORMAT,
        }
        name = hashlib.sha256(json.dumps(self._place).encode()).hexdigest()[:16]
        self.path: Path | None = None
        self._problem: str | None = None
        if group.rank() == 0:
            try:
                self.path = folder() / f"chunks-{name}.json"
            except NoCache as error:
                self._problem = str(error)
        self._seconds = _message(group, device)
        found: list[Any] = [self._read()]
        dist.broadcast_object_list(found, dist.get_global_rank(group, 0), group=group)
        self.found: dict[str, Any] = found[0]

    def add(self, name: str, trial: Mapping[int, list[float]]) -> str | None:
        """Stores a trial; returns why it failed, once."""
        if self.path is not None:
            trials = {**self._read(), name: trial}
            kept = {"place": self._place, "message_seconds": self._seconds, "trials": trials}
            try:
                _replace(self.path, json.dumps(kept, indent=1))
            except OSError as error:
                self._problem, self.path = f"{self.path}: {error.strerror or error}", None
        problem, self._problem = self._problem, None
        return problem

    def _read(self) -> dict[str, Any]:
        if self.path is None:
            return {}
        try:
            kept = json_file.read(self.path, _FILE)
        except json_file.JsonFileError:
            return {}
        before, trials = kept["message_seconds"], kept["trials"]
        return trials if before / _MAX_TIME_RATIO < self._seconds < before * _MAX_TIME_RATIO else {}


def _replace(path: Path, text: str) -> None:
    """Replaces atomically for concurrent readers."""
    handle, scratch = tempfile.mkstemp(dir=path.parent)
    try:
        with open(handle, "w") as file:
            file.write(text)
        os.replace(scratch, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise


def _of_this_rank(device: torch.device) -> str:
    chosen = current()
    name = chosen.describe() if chosen is not None and chosen.name == device.type else device.type
    return f"{name}, {torch.get_num_threads()} threads" if device.type == "cpu" else name


def _message(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds of a probe all-reduce: fastest round, slowest rank."""
    buffer = torch.zeros(_PROBE_BYTES // 4, device=device)
    seconds = []
    for _ in range(_PROBE_ROUNDS):
        start = time.perf_counter()
        dist.all_reduce(buffer, group=group)
        if device.type != "cpu":
            getattr(torch, device.type).synchronize(device)
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(min(seconds), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return float(slowest)
