"""Ring attention's messages behind its products: `python -m benchmarks.context_overlap`.

    python -m benchmarks.context_overlap [--rows 1024] [--heads 8] [--size 64] [--repeats 12] [--block 0.06]
                                         [--page docs/benchmarks/context-parallel.md]

Two processes, a core each, share a causal sequence by a ring whose messages take half and all of the time of a block's
products, and one as fast as it goes. With overlap, and with every message waited for before its step computes, A B A B.
Then four processes on two hosts: a single ring against a double ring. Two cores do not hold four processes that
compute, so that their blocks sleep; messages are real. What two lanes make of the same steps is predicted first.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # what a first backward pass imports, once for all ranks

from benchmarks import page
from benchmarks.ring_timing import RingTiming, simulate
from lab.network import Delays, Namespaces, laboratory
from lab.ranks import Measure, Rates, compare, on_ranks, slowest
from mindspeed_lite.parallel import context
from mindspeed_lite.parallel.context import ring
from mindspeed_lite.parallel.context.blocks import RankBlocks
from mindspeed_lite.parallel.context.layout import CAUSAL
from mindspeed_lite.parallel.context.ring import Move, Ring, RingP2P, programs

PASSES = ("forward", "backward")
# Times of messages between hosts and within one, in blocks of the forward pass.
BETWEEN = (1.0, 2.0, 3.0)
WITHIN = 0.125


class _Done:
    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True


class WatchedP2P(RingP2P):
    """Messages that record how long was waited for them; `at_once`: waits for each where it starts."""

    at_once = False
    waited = 0.0

    def post(self, moves: Sequence[Move], held: Any) -> None:
        super().post(moves, held)
        if not WatchedP2P.at_once:
            return
        start = time.perf_counter()
        for _, work in (*self._going, *self._coming.values()):
            work.wait()
        self._going = [(tensor, _Done()) for tensor, _ in self._going]
        self._coming = {key: (tensor, _Done()) for key, (tensor, _) in self._coming.items()}
        WatchedP2P.waited += time.perf_counter() - start

    def take(self, what: str, owner: int) -> torch.Tensor:
        start = time.perf_counter()
        try:
            return super().take(what, owner)
        finally:
            WatchedP2P.waited += time.perf_counter() - start

    def finish(self) -> None:
        start = time.perf_counter()
        super().finish()
        WatchedP2P.waited += time.perf_counter() - start


class Problem:
    """A rank's part of one attention, and the times of its passes."""

    def __init__(self, options: argparse.Namespace, group: dist.ProcessGroup) -> None:
        generator = torch.Generator().manual_seed(group.rank())
        shape = options.rows, 1, options.heads, options.size
        self.layout = context.zigzag(options.rows * group.size(), group.size())
        self.q, self.k, self.v, self.dout = (torch.randn(shape, generator=generator) for _ in range(4))
        self.leaves = [t.requires_grad_() for t in (self.q, self.k, self.v)]
        self.group = group
        # Numbers of keys and values; sums are fp32 as they are.
        self.message_bytes = 2 * self.k.numel() * 4

    def run(self, algorithm: context.Algorithm, at_once: bool, passes: Sequence[str] = PASSES) -> dict[str, Any]:
        """{pass: (seconds, of which waited)}"""
        WatchedP2P.at_once = at_once
        found = {}
        for leaf in self.leaves:
            leaf.grad = None
        for name in passes:
            dist.barrier(self.group)
            WatchedP2P.waited, start = 0.0, time.perf_counter()
            if name == "forward":
                out = context.attend(self.q, self.k, self.v, self.layout, algorithm, band=CAUSAL)
            else:
                torch.autograd.backward(out, self.dout)
            found[name] = time.perf_counter() - start, WatchedP2P.waited
        return found


class Arm(NamedTuple):
    """A ring and how it waits."""

    algorithm: context.Algorithm
    at_once: bool = False


def _race(problem: Problem, arms: dict[str, Arm], name: str, repeats: int) -> dict[str, Any]:
    """Compare the arms in one pass."""

    def run(arm: str) -> Measure:
        return Measure(*problem.run(arms[arm].algorithm, arms[arm].at_once, PASSES[: PASSES.index(name) + 1])[name])

    return compare([*arms], repeats, run)


def _two_ranks(options: argparse.Namespace, rates: Rates) -> dict[str, Any]:
    """Ring with overlap and without, on links of several speeds."""
    ring.RingP2P = WatchedP2P  # type: ignore[attr-defined, misc]
    group = dist.group.WORLD
    assert group is not None
    problem = Problem(options, group)
    own = context.Algorithm(ring=Ring(group))
    arms = {"off": Arm(own, at_once=True), "on": Arm(own)}
    free = {name: _race(problem, arms, name, 2 * options.repeats) for name in PASSES}
    # Without its waits a pass is its two blocks.
    blocks = {
        name: slowest((free[name]["seconds"]["on"] - free[name]["waited"]["on"]) / group.size()) for name in PASSES
    }
    results = [{"pass": name, "share": None, "rate": None, "block": blocks[name], **free[name]} for name in PASSES]
    for name in PASSES:
        for share in options.shares:
            rate = round(8e-6 * problem.message_bytes / (share * blocks[name]), 1)
            rates.set(rate)
            got = _race(problem, arms, name, options.repeats * (2 if name == "forward" else 1))
            results.append({"pass": name, "share": share, "rate": rate, "block": blocks[name], **got})
    return {"results": results, "bytes": problem.message_bytes}


def _four_ranks(options: argparse.Namespace, rates: Rates) -> dict[str, Any]:
    """Single against double ring, on two hosts."""
    ring.RingP2P = WatchedP2P  # type: ignore[attr-defined, misc]
    group = dist.group.WORLD
    assert group is not None
    block = {"forward": options.block, "backward": 2.5 * options.block}
    RankBlocks.forward = lambda self, *rest: time.sleep(block["forward"])  # type: ignore[assignment, method-assign]
    RankBlocks.backward = lambda self, *rest: time.sleep(block["backward"])  # type: ignore[assignment, method-assign]
    problem = Problem(options, group)
    second = dist.new_group(list(range(group.size())))
    arms = {
        "single": Arm(context.Algorithm(ring=Ring(group, second))),
        "double": Arm(context.Algorithm(ring=Ring(group, second, window=2))),
    }
    results = []
    for share in BETWEEN:
        rate = round(8e-6 * problem.message_bytes / (share * options.block), 1)
        rates.set(rate, round(8e-6 * problem.message_bytes / (WITHIN * options.block), 1))
        for name in PASSES:
            got = _race(problem, arms, name, max(3, options.repeats // 3))
            results.append({"pass": name, "share": share, "rate": rate, "block": block[name], **got})
    return {"results": results, "bytes": problem.message_bytes}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.context_overlap", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("--rows", type=int, default=1024, help="of each rank")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--size", type=int, default=64, help="of a head")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--block", type=float, default=0.06, help="seconds of a forward block that sleeps")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument("--page", type=Path)
    options = parser.parse_args(arguments)
    with laboratory(2) as (network, reason):
        two = on_ranks(2, network, partial(_two_ranks, options))
    four = {"own": on_ranks(4, Delays(ranks_per_host=2), partial(_four_ranks, options))}
    if reason is None:
        with Namespaces(4, ranks_per_host=2) as hosts:
            four = {"shared": on_ranks(4, hosts, partial(_four_ranks, options)), **four}
    text = _page(options, two, four, reason, page.command("context_overlap", arguments))
    page.write(options, text)
    return 0


def _predicted(row: dict[str, Any], arm: str, size: float) -> RingTiming:
    """What two lanes make of a row of two ranks."""
    seconds = 0.0 if row["rate"] is None else 8e-6 * size / row["rate"]
    its = programs(2)
    return simulate(its, row["block"], lambda *_: seconds, backward=row["pass"] == "backward", at_once=arm == "off")


def _predicted_on_hosts(row: dict[str, Any], arm: str, size: float, within: float, shared: bool) -> RingTiming:
    """As `_predicted`, of four ranks on two hosts."""

    def is_near(source: int, target: int) -> bool:
        return source // 2 == target // 2

    def message(rank: int, move: Move) -> float:
        return within if is_near(rank, move.peer) else 8e-6 * size / row["rate"]

    def link(source: int, target: int) -> tuple[bool, int]:
        near = is_near(source, target)
        return near, source // 2 if shared else source

    its = programs(4, 2 if arm == "double" else 1)
    return simulate(its, row["block"], message, backward=row["pass"] == "backward", link=link)


_LEGEND = """\
*block*: time of the products of one block; a message has the keys and values of a rank, or the sum of their \
gradients. *predicted*: by `benchmarks/ring_timing.py` from the block's time and the link's \
rate. *waits*: of the slowest rank, for messages and for a core. *hidden of what can be*: the waits that overlap \
removes, over those that it removes in the prediction. Sockets copy on the cores that compute, and the last sum of a \
backward pass is never hidden."""


def _page(
    options: argparse.Namespace, two: dict[str, Any], four: dict[str, Any], reason: str | None, command: str
) -> str:
    kind = page.links(reason)
    lines = [
        "# Context parallelism overlapped with computation",
        "",
        f"`{command}`",
        "",
        page.machine(),
        "",
        "## A ring of two ranks",
        "",
        f"2 processes, a core each; {kind}. {options.rows} rows of a rank, {options.heads} heads of {options.size}, "
        f"fp32, causal; a message is {two['bytes'] / 2**20:.1f} MiB. Pairs of the same pass without overlap "
        f"and with it, "
        f"A B A B, at least {options.repeats}; medians of the slowest rank, the ratio with its 95 % interval.",
        "",
        "| pass | block | message | link | off | on | off / on | predicted | waits off | waits on | "
        "hidden of what can be |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in two["results"]:
        off, on = (_predicted(row, arm, two["bytes"]) for arm in ("off", "on"))
        is_free = row["rate"] is None
        waited = row["waited"]
        hidden = 0.0 if is_free else (waited["off"] - waited["on"]) / (off.waited - on.waited)
        cells = [
            row["pass"],
            page.ms(row["block"]),
            "" if is_free else f"{row['share']:g} blocks",
            page.rate(row["rate"]),
            *(page.ms(row["seconds"][arm]) for arm in ("off", "on")),
            row["ratio"],
            f"{off.seconds / on.seconds:.2f}",
            *(page.ms(row["waited"][arm]) for arm in ("off", "on")),
            "" if is_free else f"{100 * hidden:.0f} %",
        ]
        lines.append(page.row(cells))
    lines += [
        "",
        _LEGEND,
        "",
        "## A double ring on two hosts",
        "",
        f"4 processes, two to a host, a message of {WITHIN:g} blocks within a host. A block sleeps, "
        f"{1e3 * options.block:.0f} ms forward and {2.5e3 * options.block:.0f} ms backward: what is measured is the "
        "order of the messages. Links between hosts are one for each host (network namespaces) or one for each rank "
        "(in the clock alone).",
        "",
        "| links | pass | message between hosts | single | double, window 2 | single / double | predicted |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, found in four.items():
        for row in found["results"]:
            within = WITHIN * options.block
            single, double = (
                _predicted_on_hosts(row, arm, found["bytes"], within, kind == "shared") for arm in ("single", "double")
            )
            cells = [
                "one a host" if kind == "shared" else "one a rank",
                row["pass"],
                f"{row['share'] * options.block / row['block']:g} blocks",
                *(page.ms(row["seconds"][arm]) for arm in ("single", "double")),
                row["ratio"],
                f"{single.seconds / double.seconds:.2f}",
            ]
            lines.append(page.row(cells))
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
