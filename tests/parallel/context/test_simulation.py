"""The time of a ring's steps: by hand, against the formula that chooses an algorithm, and against real messages."""

from __future__ import annotations

import itertools
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lab.network import Delays
from mindspeed_lite.parallel import context
from mindspeed_lite.parallel.context.cost import AttentionWork, predict
from mindspeed_lite.parallel.context.partial import RankBlocks
from mindspeed_lite.parallel.context.ring import Ring
from mindspeed_lite.parallel.context.schedule import programs
from mindspeed_lite.parallel.context.simulation import simulate
from tests.harness.patience import once_of
from tests.harness.process_groups import joined
from tests.harness.processes import forked, on_ranks


@pytest.mark.parametrize(
    ("ranks", "window", "backward", "at_once", "message", "seconds", "waited"),
    [
        # Two blocks of 4 s; the hop hides behind the first, or does not.
        (2, 1, False, False, 3, 8, 0),
        (2, 1, False, False, 6, 10, 2),
        (2, 1, False, True, 3, 11, 3),
        # The last sum has nothing beside it.
        (2, 1, True, False, 4, 12, 4),
        (2, 1, True, True, 4, 16, 8),
        (4, 1, False, False, 8, 28, 12),
        # Outer and inner hops share a rank's one link here: 16 s until both have come, beside 8 s of two blocks, ...
        (4, 2, False, False, 2, 16, 0),
        (1, 1, True, False, 9, 4, 0),
    ],
)
def test_by_hand(ranks, window, backward, at_once, message, seconds, waited):
    found = simulate(programs(ranks, window), 4, lambda *_: message, backward=backward, at_once=at_once)
    assert found == pytest.approx((seconds, waited))


def test_a_double_ring_has_two_blocks_for_a_hop_between_hosts():
    """7 blocks' time against 4 where each rank has a link to other hosts, against 6 where two share one."""

    def seconds(window, shared):
        found = simulate(
            programs(4, window),
            1,
            lambda rank, move: 0 if rank // 2 == move.peer // 2 else 2,
            link=lambda source, target: (source // 2 == target // 2, source // 2 if shared else source),
        )
        return found.seconds

    assert [seconds(*each) for each in itertools.product((1, 2), (False, True))] == [7, 7, 4, 6]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("flops_per_byte", [1.0, 30.0, 100.0, 1000.0])
def test_what_chooses_an_algorithm_counts_what_the_steps_expose(ranks, flops_per_byte):
    work = AttentionWork(64, 1, 4, 4, 8, 8, 2, ranks, True)
    keys, sums = 64 * 4 * 16 * 2, 64 * 4 * 16 * 4
    block = 64**2 * 4 * 16 / flops_per_byte
    its = programs(ranks)
    exposed = simulate(its, block, lambda *_: keys).waited
    exposed += simulate(its, 2.5 * block, lambda _, move: keys if move.what == "kv" else sums, backward=True).waited
    assert predict(work, flops_per_byte)["ring"].exposed == pytest.approx(exposed)


BLOCK, ROWS = 0.1, 64


@once_of(8)
@forked("features")
def test_nine_tenths_of_what_can_be_hidden_is_hidden():
    """Blocks of a known time on links of a known speed, whatever else the machine does: sleep, not arithmetic."""
    folder = Path(tempfile.mkdtemp())

    def body(rank):
        RankBlocks.forward = lambda self, *rest: time.sleep(BLOCK)
        RankBlocks.backward = lambda self, *rest: time.sleep(BLOCK)
        lab = Delays()
        lab.enter(rank)
        group = joined(rank, 2, folder)
        lab.set_rate(8e-6 * 2 * ROWS * 64 * 4 / BLOCK)  # a message takes as long as a block
        algorithm = context.Algorithm(ring=Ring(group, dist.new_group([0, 1])))
        q, k, v = (torch.zeros(ROWS, 1, 4, 16, requires_grad=True) for _ in range(3))
        took = {"forward": [], "backward": []}
        for _ in range(8):  # whatever else runs on this machine only adds
            dist.barrier()
            start = time.perf_counter()
            out = context.attend(q, k, v, context.zigzag(2 * ROWS, 2), algorithm, band=(-1, 0))
            took["forward"].append(time.perf_counter() - start)
            dist.barrier()
            start = time.perf_counter()
            out.sum().backward()
            took["backward"].append(time.perf_counter() - start)
        for name, seconds in took.items():
            off, on = (
                simulate(programs(2), BLOCK, lambda *_: BLOCK, backward=name == "backward", at_once=at_once).seconds
                for at_once in (True, False)
            )
            hidden = off - min(seconds)
            assert hidden >= 0.9 * (off - on), f"{name}: {hidden:.3f} s of {off - on:.3f} s hidden"

    on_ranks(2, body)
