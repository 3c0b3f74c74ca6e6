"""The model of two lanes: what can be hidden, worked out by hand; and that layers in chunks come near to it."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lab.network import Delays
from lab.timeline import Timeline
from lab.two_lanes import Seconds, predict_overlap
from mindspeed_lite.parallel import overlapped_gemm
from tests.harness.patience import once_of
from tests.harness.processes import forked, on_ranks


@pytest.mark.parametrize(
    ("phase", "chunks", "takes", "now", "exposed"),
    [
        # Megatron's order: one after the other.
        ("column forward", 1, Seconds(4, gather=2), 6, 2),
        ("row forward", 1, Seconds(4, reduce=2), 6, 2),
        ("row backward", 1, Seconds(4, weight=4, gather=2), 10, 2),
        # Megatron hides both behind the two products already.
        ("column backward", 1, Seconds(4, weight=4, gather=2, reduce=2), 8, 0),
        # Own rows (2 s) while the first half (2 s) comes; the second comes at 4, when the first half's product is 3.
        ("column forward", 2, Seconds(4, gather=4), 5, 1),
        ("column forward", 4, Seconds(4, gather=4), 4.5, 0.5),
        # The last quarter's message has nothing left beside it.
        ("row forward", 4, Seconds(4, reduce=4), 5, 1),
        ("row forward", 4, Seconds(4, reduce=2), 4.5, 0.5),
        ("row backward", 4, Seconds(4, weight=4, gather=4), 8.5, 0.5),
        # The gather delays the scatter's chunks: 4 + 4 of messages beside 3 + 3 of products.
        ("column backward", 2, Seconds(3, weight=3, gather=4, reduce=4), 8, 2),
    ],
)
def test_by_hand(phase, chunks, takes, now, exposed):
    lanes = predict_overlap(phase, chunks, 2, takes)
    assert (lanes.now, lanes.exposed) == pytest.approx((now, exposed))


PRODUCT, ROWS, WIDTH = 0.12, 64, 64


@once_of(8)
@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
@forked("torch")
def test_nine_tenths_of_what_can_be_hidden_is_hidden(share):
    """Products of a known time on links of a known speed, whatever else the machine does: sleep, not arithmetic."""
    folder = Path(tempfile.mkdtemp())

    def body(rank):
        lab = Delays()
        lab.enter(rank)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        view = Timeline()
        view.install()

        def product(x, w, out=None):
            time.sleep(PRODUCT * len(x) / ROWS)
            return out if out is not None else x.new_zeros(len(x), w.shape[1])

        class Torch:
            """torch with products that take PRODUCT seconds for all rows."""

            mm = staticmethod(product)

            def __getattr__(self, name):
                return getattr(torch, name)

        overlapped_gemm.torch = Torch()
        # What a rank sends of a matrix is half of it; the whole takes `share` of its product.
        lab.set_rate(ROWS // 2 * WIDTH * 4 * 8 / (share * PRODUCT) / 1e6)
        takes = {
            "column forward": Seconds(PRODUCT, gather=share * PRODUCT),
            "row forward": Seconds(PRODUCT, reduce=share * PRODUCT),
        }
        x, w = torch.zeros(ROWS // 2, WIDTH), torch.zeros(WIDTH, WIDTH)
        group = dist.group.WORLD
        calls = {
            "column forward": lambda: overlapped_gemm.gather_matmul(x, w, group, 4),
            "row forward": lambda: overlapped_gemm.matmul_scatter(torch.zeros(ROWS, WIDTH), w, group, 4).wait(),
        }
        for phase, call in calls.items():
            waited = []
            for _ in range(5):  # whatever else runs on this machine only adds to a wait
                dist.barrier()
                with view:
                    call()
                waited.append(view.waited)
            can = share * PRODUCT - predict_overlap(phase, 4, 2, takes[phase]).exposed
            hidden = share * PRODUCT - min(waited)
            assert hidden >= 0.9 * can, f"{phase}: {hidden:.3f} s of {can:.3f} s hidden"

    on_ranks(2, body)
