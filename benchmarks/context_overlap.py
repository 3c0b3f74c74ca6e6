"""Ring attention's messages overlapped with its products.

Two processes, a core each, share a causal sequence; without overlap every message is waited for where it starts.
"""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # what a first backward pass imports, once for all ranks

from benchmarks.harness import LINK, OFF_ON, RATIOS, WAITS, Benchmark, Options, Row, over_shares
from lab.ranks import Measure, Rates, compare, on_ranks, timed
from lab.timeline import Timeline
from mindspeed_lite.parallel import context
from mindspeed_lite.parallel.context.layout import CAUSAL
from mindspeed_lite.parallel.context.ring import Ring

_DONE = SimpleNamespace(wait=lambda: None, is_completed=lambda: True)


def _rows(options: Options, rates: Rates) -> list[Row]:
    group, timeline = dist.group.WORLD, Timeline()
    assert group is not None
    timeline.install()
    issue = dist.batch_isend_irecv
    generator = torch.Generator().manual_seed(group.rank())
    shape = options.rows, 1, options.heads, options.size
    *leaves, dout = (torch.randn(shape, generator=generator) for _ in range(4))
    q, k, v = (each.requires_grad_() for each in leaves)
    layout, ring = context.zigzag(options.rows * group.size(), group.size()), context.Algorithm(ring=Ring(group))

    def wait_at_once(operations: list[dist.P2POp]) -> list[Any]:
        for work in issue(operations):
            work.wait()
        return [_DONE] * len(operations)

    def forward_backward() -> None:
        torch.autograd.grad(context.attend(q, k, v, layout, ring, band=CAUSAL), (q, k, v), dout)

    def run(arm: str) -> Measure:
        with mock.patch.object(dist, "batch_isend_irecv", wait_at_once if arm == "off" else issue):
            return Measure(timed(forward_backward, timeline), timeline.waited)

    # Keys and values are sent forward and backward, and the sum of their gradients backward.
    sent = 3 * 2 * k.numel() * 4
    return over_shares(options.shares, rates, lambda: sent, lambda: compare(("off", "on"), options.repeats, run))


BENCHMARK = Benchmark(
    name="context_overlap",
    title="Context parallelism overlapped with computation",
    about="Ring attention of two ranks, forward and backward, on modelled links: {rows} rows of a rank, {heads} heads "
    f"of {{size}}, fp32, causal. {RATIOS}",
    columns={**LINK, **OFF_ON, **WAITS},
    measure=lambda options: on_ranks(2, partial(_rows, options)),
    options={"rows": 1024, "heads": 8, "size": 64, "repeats": 12, "shares": [0.5, 1.0]},
    tiny={"rows": 64, "heads": 2, "size": 16, "repeats": 2, "shares": [0.5]},
    note="*off*: every message is waited for where it starts.",
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
