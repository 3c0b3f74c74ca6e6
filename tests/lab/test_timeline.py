"""The lanes of a process: what is computed, waited for and in flight, and the files that show it."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lab.network import Delays
from lab.timeline import (
    COMPUTE,
    EXPERTS,
    FLIGHT,
    WAIT,
    Timeline,
)
from tests.harness.patience import once_of
from tests.harness.processes import forked, on_ranks

DELAY = 0.1


def lasting(spans, lane):
    return sum(each.end - each.start for each in spans if each.lane == lane)


@once_of(8)
@forked("torch")
def test_lanes():
    folder = Path(tempfile.mkdtemp())

    def body(rank):
        lab = Delays(latency=DELAY)
        lab.set_rate(1e9)
        lab.enter()
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        view, before = Timeline(), dist.all_reduce
        remove = view.install()
        assert dist.isend is dist.distributed_c10d.isend, "a batch of sends is checked by identity"
        x = torch.ones(4)
        dist.all_reduce(x)
        assert view.spans == [], "nothing is recorded outside of the block"
        dist.barrier()
        waited, computed = [], []
        for _ in range(3):
            with view:
                dist.all_reduce(x)  # waits for all of it
                handle = dist.all_reduce(x, async_op=True)
                time.sleep(0.6 * DELAY)  # computes
                handle.wait()
            waited.append(view.waited)
            computed.append(lasting(view.spans, COMPUTE))
            assert len([each for each in view.spans if each.lane == FLIGHT]) == 2
            assert {each.name for each in view.spans if each.lane != COMPUTE} == {"all_reduce"}
            ends = [each for each in view.spans if each.lane in (COMPUTE, WAIT)]
            whole = max(each.end for each in ends)
            assert computed[-1] + view.waited == pytest.approx(whole, rel=1e-3), "no time is lost"
        # Whatever else runs on this machine makes both longer; but what computes for longer waits for less afterwards.
        assert min(waited) > 0.95 * DELAY and min(map(sum, zip(waited, computed, strict=True))) > 1.9 * DELAY
        assert min(waited) < 1.9 * DELAY and 0.6 * DELAY < min(computed) < DELAY
        with view:
            time.sleep(0.01)
        assert [each.lane for each in view.spans] == [COMPUTE], "each recording starts anew"
        remove()
        assert dist.all_reduce is before

    on_ranks(2, body)


@forked("torch")
def test_experts_have_a_lane_and_bytes_of_their_own():
    folder = Path(tempfile.mkdtemp())

    def body(rank):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        experts, others = dist.new_group([0, 1]), dist.new_group([0, 1])
        view = Timeline(lambda group: group is experts)
        view.install()
        x, out = torch.ones(6, 4), torch.empty(6, 4)
        with view:
            dist.all_to_all_single(out, x, [3, 3], [3, 3], group=experts)
            dist.all_gather_into_tensor(torch.empty(12, 4), x, group=others)
            dist.all_to_all_single(out, x, group=experts, async_op=True).wait()
        # Two messages of three rows to the other rank.
        assert view.sent == {1 - rank: 2 * 3 * 4 * 4}
        assert [each.name for each in view.spans if each.lane == WAIT].count(EXPERTS) == 2
        assert 0 < view.waited_for_experts < view.waited and view.seconds(EXPERTS) > 0
        assert len([each for each in view.spans if each.lane == FLIGHT]) == 1

    on_ranks(2, body)
