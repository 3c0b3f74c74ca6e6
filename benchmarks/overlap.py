"""Communication overlapped with computation on links of chosen speed: `python -m benchmarks.overlap`.

    python -m benchmarks.overlap [--ranks 2] [--rows 1024] [--hidden 1024] [--ffn 2816] [--repeats 12]
                                 [--shares 0.25 0.5 1.0] [--page docs/benchmarks/overlap.md]

An MLP's two linear layers under tensor and sequence parallelism, forward and backward, on processes that a network
laboratory joins: links so slow that the messages of a step take a quarter, half and all of the time of its products,
and one as fast as it goes. In one message (Megatron's order) and in chunks (`--coc-parallel-num auto`), A B A B.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import page
from lab import timeline
from lab.network import laboratory
from lab.ranks import Measure, Rates, compare, on_ranks, slowest
from lab.two_lanes import PHASES, Seconds, predict_overlap
from mindspeed_lite.parallel.tp_linear import (
    AUTOGRAD_WGRAD,
    ChunkPolicy,
    TPCommConfig,
    column_linear,
    fixed_chunks,
    row_linear,
)
from mindspeed_lite.tuning.chunk_autotuner import ChunkAutotuner


class Problem:
    """The two layers of one rank, and the time of each of their parts alone."""

    def __init__(self, options: argparse.Namespace, group: dist.ProcessGroup) -> None:
        generator = torch.Generator().manual_seed(group.rank())
        ranks, inner = group.size(), options.ffn // group.size()
        self.group = group
        self.x = torch.randn(options.rows // ranks, 1, options.hidden, generator=generator).requires_grad_()
        self.up = torch.randn(inner, options.hidden, generator=generator).requires_grad_()
        self.down = torch.randn(options.hidden, inner, generator=generator).requires_grad_()
        self.dy = torch.randn(options.rows // ranks, 1, options.hidden, generator=generator)

    def step(self, chunks: ChunkPolicy) -> None:
        """Forward and backward."""
        link = TPCommConfig(self.group, True, chunks, AUTOGRAD_WGRAD)
        y = row_linear(column_linear(self.x, self.up, None, link), self.down, link)
        self.x.grad = self.up.grad = self.down.grad = None
        torch.autograd.backward(y, self.dy)

    def parts(self, repeats: int) -> dict[str, Seconds]:
        """Seconds of products and messages, each alone."""
        group, rows = self.group, self.x.shape[0] * self.group.size()
        wide, narrow = torch.randn(rows, self.up.shape[0]), torch.randn(rows, self.up.shape[1])
        up, down = self.up.detach(), self.down.detach()
        part, whole = torch.empty_like(self.x[:, 0]), torch.empty(rows, self.up.shape[1])

        def median(run: Callable[[], object]) -> float:
            times = []
            for _ in range(repeats):
                dist.barrier(group)
                start = time.perf_counter()
                run()
                times.append(time.perf_counter() - start)
            return slowest(statistics.median(times))

        gather = median(lambda: dist.all_gather_into_tensor(whole, part, group=group))
        reduce = median(lambda: dist.reduce_scatter_tensor(part, whole, group=group))
        fc1 = median(lambda: narrow @ up.t())
        fc2 = median(lambda: wide @ down.t())
        return {
            "column forward": Seconds(fc1, gather=gather),
            "row forward": Seconds(fc2, reduce=reduce),
            "row backward": Seconds(
                median(lambda: narrow @ down), weight=median(lambda: narrow.t() @ wide), gather=gather
            ),
            "column backward": Seconds(
                median(lambda: wide @ up), weight=median(lambda: wide.t() @ narrow), gather=gather, reduce=reduce
            ),
        }


def _measure(options: argparse.Namespace, rates: Rates) -> list[dict[str, Any]]:
    view = timeline.Timeline()
    view.install()
    assert dist.group.WORLD is not None
    problem = Problem(options, dist.group.WORLD)
    problem.step(fixed_chunks(1))
    free = problem.parts(options.repeats)
    computing = sum(each.product + each.weight for each in free.values())
    results = []
    for share in (None, *options.shares):
        # Three gathers and two scatters, for which gloo reduces the whole: twice the bytes, which modelled links do
        # not charge.
        sent = 3 + 2 * (1 if rates.are_modelled else 2)
        matrix = options.rows * options.hidden * 4 * (options.ranks - 1) / options.ranks
        rate = None if share is None else round(8e-6 * matrix * sent / (share * computing), 1)
        rates.set(rate)
        results.append({"share": share, "rate": rate, **_race(problem, options, view)})
    return results


def _race(problem: Problem, options: argparse.Namespace, view: timeline.Timeline) -> dict[str, Any]:
    said: list[str] = []
    takes = problem.parts(options.repeats)
    trials = ChunkAutotuner(problem.group, said.append)
    problem.step(trials)
    chosen: dict[str, int] = {}

    def auto(phase: str, x: torch.Tensor, w: torch.Tensor, run: Callable[[int], object]) -> int:
        chosen[phase] = trials(phase, x, w, run)
        return chosen[phase]

    arms: dict[str, ChunkPolicy] = {"off": fixed_chunks(1), "on": auto}
    spans: dict[str, list[timeline.Span]] = {}

    def run(arm: str) -> Measure:
        dist.barrier()
        with view:
            start = time.perf_counter()
            problem.step(arms[arm])
            seconds = time.perf_counter() - start
        spans[arm] = view.spans
        return Measure(seconds, view.waited)

    found = compare([*arms], options.repeats, run)
    gathered: list[Any] = [None] * options.ranks
    dist.all_gather_object(gathered, spans)
    predicted = {
        arm: [
            predict_overlap(phase, 1 if arm == "off" else chosen.get(phase, 1), options.ranks, takes[phase])
            for phase in PHASES
        ]
        for arm in arms
    }
    return {
        **found,
        "computing": sum(each.product + each.weight for each in takes.values()),
        "sending": sum(each.gather + each.reduce for each in takes.values()),
        "said": said,
        "predicted": {arm: sum(each.now for each in lanes) for arm, lanes in predicted.items()},
        "exposed": {arm: sum(each.exposed for each in lanes) for arm, lanes in predicted.items()},
        "spans": {
            arm: {rank: [vars(span) for span in each[arm]] for rank, each in enumerate(gathered)} for arm in arms
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--ffn", type=int, default=2816)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 1.0])
    parser.add_argument("--page", type=Path)
    options = parser.parse_args(arguments)
    with laboratory(options.ranks) as (network, reason):
        results = on_ranks(options.ranks, network, partial(_measure, options))
    page.write(options, _page(options, results, reason, page.command("overlap", arguments)))
    if options.page is not None:
        _pictures(options.page, results)
    return 0


def _page(options: argparse.Namespace, results: list[dict[str, Any]], reason: str | None, command: str) -> str:
    lines = [
        "# Communication overlapped with computation",
        "",
        f"`{command}`",
        "",
        f"{page.machine()} {options.ranks} processes, a core each; {page.links(reason)}. An MLP of {options.rows} "
        f"rows, hidden size {options.hidden} and ffn {options.ffn} in fp32, tensor and sequence parallel, forward and "
        f"backward, {options.repeats} pairs of a step in one message and a step in chunks, A B A B; medians, the ratio "
        "with its 95 % interval.",
        "",
        "| link | products | messages | off | on | off / on | predicted | waits off | waits on | hidden of what can |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in results:
        predicted = each["predicted"]
        can = each["sending"] - each["exposed"]["on"]
        hidden = (each["sending"] - each["waited"]["on"]) / can if each["share"] is not None else None
        cells = [
            page.rate(each["rate"]),
            *(page.ms(each[name]) for name in ("computing", "sending")),
            *(page.ms(each["seconds"][arm]) for arm in ("off", "on")),
            each["ratio"],
            f"{predicted['off'] / predicted['on']:.2f}",
            *(page.ms(each["waited"][arm]) for arm in ("off", "on")),
            "" if hidden is None else f"{100 * hidden:.0f} %",
        ]
        lines.append(page.row(cells))
    lines += [
        "",
        "*products*, *messages*: each alone, of the slowest rank. *predicted*: off / on from these times and the "
        "chosen chunks. *hidden of what can be*: messages less waits, over messages less the predicted waits; "
        "above 100 % where messages went faster than alone. Waits include the ranks' differences, which the first "
        "line shows.",
        "",
        "Chunks that were chosen:",
        "",
    ]
    for each in results:
        lines += [f"- {page.rate(each['rate'])}:", *(f"    - {text}" for text in each["said"])]
    lines += ["", "One step of every rank at the slowest link, in one message above, in chunks below:", ""]
    lines += [
        "![lanes](overlap/lanes.png)",
        "",
        "The same as Chrome traces: `overlap/off.json`, `overlap/on.json`.",
        "",
    ]
    return "\n".join(lines)


def _pictures(page: Path, results: list[dict[str, Any]]) -> None:
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    arms = {
        arm: {int(rank): [timeline.Span(**span) for span in spans] for rank, spans in by_rank.items()}
        for arm, by_rank in results[-1]["spans"].items()
    }
    for arm, by_rank in arms.items():
        timeline.write_trace(folder / f"{arm}.json", by_rank)
    timeline.draw(folder / "lanes.png", arms, f"a step at {results[-1]['rate']:.0f} Mbit/s")


if __name__ == "__main__":
    sys.exit(main())
