"""Tensor-parallel communication overlapped with computation, on links of chosen speed.

An MLP's two linear layers under tensor and sequence parallelism, forward and backward: in one message (Megatron's
order) and in chunks (`--coc-parallel-num auto`), on links so slow that a step's messages take shares of its products.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import LINK, OFF_ON, RATIOS, WAITS, Benchmark, Options, Row, over_shares
from lab.ranks import Measure, Rates, compare, gathered, on_ranks, timed
from lab.timeline import Span, Timeline, draw
from mindspeed_lite.parallel.tp_linear import (
    AUTOGRAD_WGRAD,
    ChunkPolicy,
    TPCommConfig,
    column_linear,
    fixed_chunks,
    row_linear,
)
from mindspeed_lite.tuning.chunk_autotuner import ChunkAutotuner


class _Layers:
    """The two layers of one rank."""

    def __init__(self, options: Options, group: dist.ProcessGroup) -> None:
        generator = torch.Generator().manual_seed(group.rank())
        rows, inner = options.rows // group.size(), options.ffn // group.size()
        self.group = group
        self.x = torch.randn(rows, 1, options.hidden, generator=generator).requires_grad_()
        self.up = torch.randn(inner, options.hidden, generator=generator).requires_grad_()
        self.down = torch.randn(options.hidden, inner, generator=generator).requires_grad_()
        self.dy = torch.randn(rows, 1, options.hidden, generator=generator)

    def step(self, chunks: ChunkPolicy) -> None:
        """Forward and backward."""
        comm = TPCommConfig(self.group, True, chunks, AUTOGRAD_WGRAD)
        y = row_linear(column_linear(self.x, self.up, None, comm), self.down, comm)
        self.x.grad = self.up.grad = self.down.grad = None
        torch.autograd.backward(y, self.dy)


def _rows(options: Options, rates: Rates) -> list[Row]:
    timeline = Timeline()
    timeline.install()
    assert dist.group.WORLD is not None
    layers = _Layers(options, dist.group.WORLD)
    layers.step(fixed_chunks(1))
    # Three gathers and two scatters.
    sent = 5 * options.rows * options.hidden * 4 * (options.ranks - 1) / options.ranks
    return over_shares(options.shares, rates, lambda: sent, lambda: _compared(layers, options, timeline))


def _compared(layers: _Layers, options: Options, timeline: Timeline) -> Row:
    autotuner = ChunkAutotuner(layers.group, lambda text: None)
    chosen: dict[str, int] = {}

    def auto(phase: str, x: torch.Tensor, w: torch.Tensor, run: Callable[[int], object]) -> int:
        chosen[phase] = autotuner(phase, x, w, run)
        return chosen[phase]

    arms: dict[str, ChunkPolicy] = {"off": fixed_chunks(1), "on": auto}
    spans: dict[str, list[Any]] = {}

    def run(arm: str) -> Measure:
        seconds = timed(partial(layers.step, arms[arm]), timeline)
        spans[arm] = [vars(each) for each in timeline.spans]
        return Measure(seconds, timeline.waited)

    measured = compare([*arms], options.repeats, run)
    return {**measured, "chunks": chosen, "spans": gathered(spans)}


def _picture(page: Path, options: Options, rows: list[Row]) -> None:
    by_rank = rows[-1]["spans"]
    arms = {
        arm: {rank: [Span(**span) for span in spans[arm]] for rank, spans in enumerate(by_rank)}
        for arm in ("off", "on")
    }
    page.with_suffix("").mkdir(exist_ok=True)
    draw(page.with_suffix("") / "lanes.png", arms, f"a step at {rows[-1]['rate']:.0f} Mbit/s")


BENCHMARK = Benchmark(
    name="overlap",
    title="Communication overlapped with computation",
    about="{ranks} processes, a core each, modelled links: an MLP of {rows} rows, hidden size {hidden} and ffn {ffn}, "
    f"fp32, tensor and sequence parallel, in one message and in chunks. {RATIOS}",
    columns={
        **LINK,
        **OFF_ON,
        **WAITS,
        "chunks": lambda row: ", ".join(f"{phase} {count}" for phase, count in row["chunks"].items()),
    },
    measure=lambda options: on_ranks(options.ranks, partial(_rows, options)),
    options={"ranks": 2, "rows": 1024, "hidden": 1024, "ffn": 2816, "repeats": 12, "shares": [0.25, 0.5, 1.0]},
    tiny={"rows": 64, "hidden": 64, "ffn": 128, "repeats": 1, "shares": [0.5]},
    note="A step of every rank on the slowest link:\n\n![lanes](overlap/lanes.png)",
    finish=_picture,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
