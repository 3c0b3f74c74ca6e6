"""Processes of one benchmark on the links of a network laboratory, whose rates they may change."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lab.network import Delays, Network


class Rates:
    """Sets the rates of all links, from within the ranks."""

    def __init__(self, network: Network, turn: Any) -> None:
        self._network, self._turn = network, turn

    def set(self, megabits: float | None, within: float | None = None) -> tuple[float | None, float | None]:
        """Called by all ranks; rank 0's rates hold, and are returned. By the process that made the links, or each."""
        told: list[Any] = [(megabits, within)]
        dist.broadcast_object_list(told)
        dist.barrier()
        if isinstance(self._network, Delays):
            self._network.set_rate(*told[0])
        elif dist.get_rank() == 0:
            self._turn.send(told[0])
            self._turn.recv()
        dist.barrier()
        found: tuple[float | None, float | None] = told[0]
        return found


class Loopback:
    """No laboratory: messages are as fast as they go."""

    kind = "loopback"

    def enter(self, rank: int) -> None:
        pass

    def set_rate(self, megabits: float | None, within: float | None = None) -> None:
        pass


def on_ranks(ranks: int, network: Network, body: Callable[[Rates], Any]) -> Any:
    """What `body` returns on rank 0, as JSON has it; each rank has a core where there are enough.

    SystemExit if a rank failed.
    """
    out = Path(tempfile.mkdtemp())
    ours, theirs = multiprocessing.Pipe()
    started = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            try:
                network.enter(rank)
                torch.set_num_threads(1)
                cores = sorted(os.sched_getaffinity(0))
                if ranks <= len(cores):
                    os.sched_setaffinity(0, {cores[rank]})
                dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=ranks)
                found = body(Rates(network, theirs))
                if rank == 0:
                    (out / "results.json").write_text(json.dumps(found))
                dist.barrier()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        started.append(pid)
    codes: list[int] = []
    while len(codes) < len(started):
        if ours.poll(0.02):
            network.set_rate(*ours.recv())
            ours.send(None)
        done, status = os.waitpid(-1, os.WNOHANG)
        if done:
            codes.append(os.waitstatus_to_exitcode(status))
    if any(codes):
        raise SystemExit("a rank failed")
    return json.loads((out / "results.json").read_text())
