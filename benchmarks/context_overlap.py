"""Ring attention's messages overlapped with its products, and a double ring on two hosts.

Two processes, a core each, share a causal sequence; without overlap every message is waited for where it starts. Two
cores do not hold four processes that compute, so that the blocks of the double ring sleep; messages are real.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # what a first backward pass imports, once for all ranks

from benchmarks.harness import LINK, OFF_ON, RATIOS, WAITS, Benchmark, Options, Row, on_links, over_shares
from lab.ranks import Measure, Rates, compare
from lab.timeline import Timeline
from mindspeed_lite.parallel import context
from mindspeed_lite.parallel.context.blocks import RankBlocks
from mindspeed_lite.parallel.context.layout import CAUSAL
from mindspeed_lite.parallel.context.ring import Ring

# Of a message within a host, in blocks.
WITHIN = 0.125
_DONE = SimpleNamespace(wait=lambda: None, is_completed=lambda: True)


class _Problem:
    """A rank's part of one attention."""

    def __init__(self, options: Options, group: dist.ProcessGroup) -> None:
        generator = torch.Generator().manual_seed(group.rank())
        shape = options.rows, 1, options.heads, options.size
        self.group, self.timeline = group, Timeline()
        self.timeline.install()
        self.layout = context.zigzag(options.rows * group.size(), group.size())
        *self.leaves, self.dout = (torch.randn(shape, generator=generator) for _ in range(4))
        for leaf in self.leaves:
            leaf.requires_grad_()
        # Keys and values.
        self.message_bytes = 2 * self.leaves[1].numel() * 4

    def run(self, algorithm: context.Algorithm, is_waited_for: bool) -> Measure:
        """Forward and backward pass."""
        issue = dist.batch_isend_irecv

        def wait_at_once(operations: list[dist.P2POp]) -> list[Any]:
            for work in issue(operations):
                work.wait()
            return [_DONE] * len(operations)

        dist.barrier(self.group)
        with mock.patch.object(dist, "batch_isend_irecv", wait_at_once if is_waited_for else issue), self.timeline:
            start = time.perf_counter()
            q, k, v = self.leaves
            out = context.attend(q, k, v, self.layout, algorithm, band=CAUSAL)
            torch.autograd.grad(out, self.leaves, self.dout)
            seconds = time.perf_counter() - start
        return Measure(seconds, self.timeline.waited)


def _overlap(options: Options, rates: Rates) -> list[Row]:
    """A ring of two ranks; each sends keys and values twice, and the sum of their gradients."""
    group = dist.group.WORLD
    assert group is not None
    problem = _Problem(options, group)
    ring = context.Algorithm(ring=Ring(group))
    found = over_shares(
        options.shares,
        rates,
        lambda: 3 * problem.message_bytes,
        lambda: compare(("off", "on"), options.repeats, lambda arm: problem.run(ring, arm == "off")),
    )
    return [{"what": "2 ranks, overlap", **row} for row in found]


def _double_ring(options: Options, rates: Rates) -> list[Row]:
    """Single and double ring of four ranks on two hosts, with blocks that sleep."""
    group = dist.group.WORLD
    assert group is not None

    def sleeping(seconds: float) -> Callable[..., None]:
        return lambda *_: time.sleep(seconds)

    RankBlocks.forward = sleeping(options.block)  # type: ignore[assignment, method-assign]
    RankBlocks.backward = sleeping(2.5 * options.block)  # type: ignore[assignment, method-assign]
    problem, second, rows = _Problem(options, group), dist.new_group(list(range(group.size()))), []
    arms = {
        "off": context.Algorithm(ring=Ring(group, second)),
        "on": context.Algorithm(ring=Ring(group, second, window=2)),
    }
    seconds_of_mbit = 8e-6 * problem.message_bytes / options.block
    for share in options.between:
        rate, _ = rates.set(round(seconds_of_mbit / share, 1), round(seconds_of_mbit / WITHIN, 1))
        measured = compare([*arms], max(2, options.repeats // 3), lambda arm: problem.run(arms[arm], False))
        rows.append({"what": "2 hosts of 2 ranks, double ring", "share": share, "rate": rate, **measured})
    return rows


def _measure(options: Options) -> list[Row]:
    return [*on_links(2, partial(_overlap, options)), *on_links(4, partial(_double_ring, options), 2)]


BENCHMARK = Benchmark(
    name="context_overlap",
    title="Context parallelism overlapped with computation",
    about="Ring attention forward and backward, {links}: {rows} rows of a rank, {heads} heads of {size}, fp32, causal. "
    f"{RATIOS}",
    columns={
        "what": lambda row: row["what"],
        **LINK,
        **OFF_ON,
        **WAITS,
    },
    measure=_measure,
    options={"rows": 1024, "heads": 8, "size": 64, "repeats": 12, "shares": [0.5, 1.0], "between": [1.0, 2.0, 3.0],
             "block": 0.06},
    tiny={"rows": 64, "heads": 2, "size": 16, "repeats": 2, "shares": [0.5], "between": [2.0], "block": 0.01},
    note="*off*: every message is waited for where it starts, or a single ring. *messages* of the double ring: time of "
    "one between hosts in forward blocks, which sleep.",
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
