"""Modelled links: bytes take the time that the link says."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lab import network
from lab.links import join
from tests.harness.patience import once_of
from tests.harness.processes import forked, on_ranks

SIZE = 250_000  # floats: 8 megabits, of which each of two ranks sends its half


def seconds_of_a_gather() -> float:
    whole, part = torch.empty(SIZE), torch.ones(SIZE // 2)
    dist.all_gather_into_tensor(whole, part)
    start = time.perf_counter()
    dist.all_gather_into_tensor(whole, part)
    assert bool((whole == 1).all())
    return time.perf_counter() - start


@once_of(8)
@forked("torch")
def test_a_training_meets_as_torchrun_starts_it_and_talks_over_the_links():
    """Groups made later use the links too."""
    for given in ({"rate": 20.0}, {"rate": 80.0, "within": 20.0, "ranks_per_host": 2}):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])

        def body(rank, given=given, port=port):
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="2")
            join(**given)
            dist.init_process_group("gloo", timeout=timedelta(seconds=250))
            assert 0.08 < seconds_of_a_gather() < 2.0
            later = dist.new_group([0, 1])
            start = time.perf_counter()
            dist.all_reduce(torch.ones(SIZE), group=later)
            assert time.perf_counter() - start > 0.1

        on_ranks(2, body)


@forked("torch")
def test_one_process_alone_has_no_link():
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    join(20.0)
    with pytest.raises(SystemExit, match="joins processes, and this training has one"):
        dist.init_process_group("gloo")


@once_of(8)
@forked("torch")
def test_a_delayed_link_carries_one_message_after_the_other():
    folder = Path(tempfile.mkdtemp())

    def body(rank):
        lab = network.Delays(latency=0.01)
        lab.enter()
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        # Whatever else runs on this machine only adds: each is the least of some.
        assert min(seconds_of_a_gather() for _ in range(5)) < 0.1, "no rate, no delay"
        lab.set_rate(40)
        # 4 megabits at 40 a second, and the latency.
        assert 0.1 < min(seconds_of_a_gather() for _ in range(3)) < 0.3
        whole, part = torch.empty(SIZE), torch.ones(SIZE // 2)

        def three_messages():
            start = time.perf_counter()
            handles = [dist.all_gather_into_tensor(whole, part, async_op=True) for _ in range(3)]
            sent = time.perf_counter() - start
            handles[0].wait()
            first = time.perf_counter() - start
            handles[2].wait()
            return sent, first, time.perf_counter() - start

        sent, first, last = map(min, zip(*(three_messages() for _ in range(3)), strict=True))
        assert sent < 0.05, "an asynchronous call has waited"
        assert 0.1 < first < 0.2 and 0.3 < last < 0.5, (first, last)

        def seconds_of(collective, *tensors):
            start = time.perf_counter()
            collective(*tensors)
            return time.perf_counter() - start

        scattered = torch.empty(SIZE // 2)
        assert 0.1 < min(seconds_of(dist.reduce_scatter_tensor, scattered, whole) for _ in range(3)) < 0.3
        assert bool((scattered == 2).all())
        assert 0.2 < min(seconds_of(dist.all_reduce, whole) for _ in range(3)) < 0.5

    on_ranks(2, body)
