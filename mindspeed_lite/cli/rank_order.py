"""Renumbers the launcher's ranks before a script reads them, in the order that `mindspeed-lite links` proposes."""

from __future__ import annotations

import os
import socket
from typing import Any

from mindspeed_lite.bench.wording import seconds
from mindspeed_lite.planner import ArgumentError, links

from .terminal import CommandError

_FLAG = "--rank-order"
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
# Keeps the store that other ranks meet in.
_store: Any = None


def apply(file: str) -> None:
    """Set RANK of this process; its host, LOCAL_RANK and device stay. Raises CommandError."""
    given = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not all(each.isdecimal() for each in given):
        raise CommandError(f"{_FLAG} numbers a launcher's ranks, and there are none: start the training with torchrun")
    rank, world = map(int, given)
    try:
        measured = links.read(file, world, _FLAG)
    except ArgumentError as error:
        raise CommandError(error) from None
    order = [*measured.order]
    if not order:
        raise CommandError(f"{_FLAG} {file}: proposes no order: measure with `links --json FILE -- COMMAND`")
    host, measured_host = socket.gethostname(), measured.hosts[rank]
    if host != measured_host.partition("(")[0]:  # a number of machines with the same name
        raise CommandError(
            f"{_FLAG} {file}: rank {rank} was measured on {measured_host}, and runs on {host}: start the nodes in the "
            "same order (torchrun --node-rank), or measure these again"
        )
    os.environ["RANK"] = str(order.index(rank))
    if order[0] and os.environ.get(_AGENT_STORE) != "True":
        _host_store(rank)
    if rank == order[0]:
        before, after = measured.seconds or (0.0, 0.0)
        gain = f"; messages of a step: {seconds(before)} -> {seconds(after)} (prediction)" if before else ""
        print(f"mindspeed_lite: ranks in the order of {file}{gain}", flush=True)


def _host_store(rank: int) -> None:
    """MASTER_ADDR is the host of the launcher's rank 0, which keeps the store for all of them."""
    global _store
    if rank == 0:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        _store = TCPStore(address, port, is_master=True, wait_for_workers=False, multi_tenant=True)
    # torch then makes no store of its own on the new rank 0.
    os.environ[_AGENT_STORE] = "True"
