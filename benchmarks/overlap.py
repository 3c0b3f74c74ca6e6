"""Communication overlapped with computation on links of chosen speed: `python -m benchmarks.overlap`.

    python -m benchmarks.overlap [--ranks 2] [--rows 1024] [--hidden 1024] [--ffn 2816] [--repeats 12]
                                 [--shares 0.25 0.5 1.0] [--page docs/benchmarks/overlap.md]

An MLP's two linear layers under tensor and sequence parallelism, forward and backward, on processes that a network
laboratory joins: links so slow that the messages of a step take a quarter, half and all of the time of its products,
and one as fast as it goes. In one message (Megatron's order) and in chunks (`--coc-parallel-num auto`), A B A B.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lab import timeline
from lab.network import Delays, Network, laboratory
from lab.two_lanes import PHASES, Seconds, predict_overlap
from mindspeed_lite.bench.statistics import paired_ratio
from mindspeed_lite.parallel.tp_linear import (
    AUTOGRAD_WGRAD,
    ChunkPolicy,
    TPCommConfig,
    column_linear,
    fixed_chunks,
    row_linear,
)
from mindspeed_lite.platform import cpu
from mindspeed_lite.tuning.chunk_autotuner import ChunkAutotuner

ROOT = Path(__file__).resolve().parent.parent


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
            return _slowest(statistics.median(times))

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


def _slowest(seconds: float) -> float:
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def _rank(options: argparse.Namespace, network: Network, rank: int, store: str, turn: Any, out: Path) -> None:
    network.enter(rank)
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    view = timeline.Timeline()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    view.install()
    assert dist.group.WORLD is not None
    problem = Problem(options, dist.group.WORLD)
    problem.step(fixed_chunks(1))
    free = problem.parts(options.repeats)
    computing = sum(each.product + each.weight for each in free.values())
    results = []
    for share in (None, *options.shares):
        # The bytes that leave a rank decide the rate. Three gathers and two scatters, for which gloo reduces the whole
        # and keeps its part: twice the bytes, in earnest; a link in the clock charges what has to travel.
        sent = 3 + 2 * (1 if isinstance(network, Delays) else 2)
        matrix = options.rows * options.hidden * 4 * (options.ranks - 1) / options.ranks
        rate = None if share is None else round(8e-6 * matrix * sent / (share * computing), 1)
        _everybody(network, turn, rank, rate)
        results.append({"share": share, "rate": rate, **_measure(problem, options, view, out)})
    if rank == 0:
        (out / "results.json").write_text(json.dumps(results))


def _everybody(network: Network, turn: Any, rank: int, rate: float | None) -> None:
    """The link's new rate: set by the process that made the network, or by each for itself."""
    if isinstance(network, Delays):
        network.set_rate(rate)
        dist.barrier()
        return
    dist.barrier()
    if rank == 0:
        turn.send(rate)
        turn.recv()
    dist.barrier()


def _measure(problem: Problem, options: argparse.Namespace, view: timeline.Timeline, out: Path) -> dict[str, Any]:
    said: list[str] = []
    takes = problem.parts(options.repeats)
    trials = ChunkAutotuner(problem.group, said.append)
    problem.step(trials)
    chosen: dict[str, int] = {}

    def auto(phase: str, x: torch.Tensor, w: torch.Tensor, run: Callable[[int], object]) -> int:
        chosen[phase] = trials(phase, x, w, run)
        return chosen[phase]

    arms: dict[str, ChunkPolicy] = {"off": fixed_chunks(1), "on": auto}
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    waited: dict[str, list[float]] = {arm: [] for arm in arms}
    spans: dict[str, list[timeline.Span]] = {}
    for _ in range(options.repeats):
        for arm, chunks in arms.items():
            dist.barrier()
            with view:
                start = time.perf_counter()
                problem.step(chunks)
                seconds[arm].append(time.perf_counter() - start)
            waited[arm].append(view.waited)
            spans[arm] = view.spans
    ratio = paired_ratio(seconds["off"], seconds["on"])
    assert ratio is not None
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
        "computing": sum(each.product + each.weight for each in takes.values()),
        "sending": sum(each.gather + each.reduce for each in takes.values()),
        "chosen": chosen,
        "said": said,
        "seconds": {arm: statistics.median(each) for arm, each in seconds.items()},
        "waited": {arm: _slowest(statistics.median(each)) for arm, each in waited.items()},
        "predicted": {arm: sum(each.now for each in lanes) for arm, lanes in predicted.items()},
        "exposed": {arm: sum(each.exposed for each in lanes) for arm, lanes in predicted.items()},
        "ratio": ratio.words(),
        "spans": {
            arm: {rank: [vars(span) for span in each[arm]] for rank, each in enumerate(gathered)} for arm in arms
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the page; 1 if a rank failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--ffn", type=int, default=2816)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 1.0])
    parser.add_argument("--page", type=Path)
    options = parser.parse_args(arguments)
    out = Path(tempfile.mkdtemp())
    with laboratory(options.ranks) as (network, reason):
        ours, theirs = multiprocessing.Pipe()
        ranks = []
        for rank in range(options.ranks):
            pid = os.fork()
            if pid == 0:
                try:
                    _rank(options, network, rank, str(out / "store"), theirs, out)
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            ranks.append(pid)
        codes: list[int] = []
        while len(codes) < len(ranks):
            if ours.poll(0.1):
                network.set_rate(ours.recv())
                ours.send(None)
            done, status = os.waitpid(-1, os.WNOHANG)
            if done:
                codes.append(os.waitstatus_to_exitcode(status))
        if any(codes):
            print("a rank failed", file=sys.stderr)
            return 1
    results = json.loads((out / "results.json").read_text())
    text = _page(options, results, network.kind, reason, arguments)
    print(text)
    if options.page is not None:
        options.page.parent.mkdir(parents=True, exist_ok=True)
        options.page.write_text(text)
        _pictures(options.page, results)
    return 0


def _page(
    options: argparse.Namespace,
    results: list[dict[str, Any]],
    kind: str,
    reason: str | None,
    given: Sequence[str] | None,
) -> str:
    command = shlex.join(["python", "-m", "benchmarks.overlap", *(sys.argv[1:] if given is None else given)])
    where = "hosts of one machine joined by links of that speed (network namespaces)"
    if kind != "namespaces":
        where = f"links that exist in the clock alone ({reason})"
    lines = [
        "# Communication overlapped with computation",
        "",
        f"`{command}`",
        "",
        f"{options.ranks} processes on {cpu.describe()}, a core each; {where}. An MLP of {options.rows} rows, hidden "
        f"size {options.hidden} and ffn {options.ffn} in fp32, tensor and sequence parallel, forward and backward, "
        f"{options.repeats} pairs of a step in one message and a step in chunks, A B A B; medians, the ratio with its "
        "95 % interval.",
        "",
        "| link | products | messages | off | on | off / on | predicted | waits off | waits on | hidden of what can |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in results:
        predicted = each["predicted"]
        can = each["sending"] - each["exposed"]["on"]
        hidden = (each["sending"] - each["waited"]["on"]) / can if each["share"] is not None else None
        link = "as fast as it goes" if each["rate"] is None else f"{each['rate']:.0f} Mbit/s"
        cells = [
            link,
            *(f"{1e3 * each[name]:.0f} ms" for name in ("computing", "sending")),
            *(f"{1e3 * each['seconds'][arm]:.0f} ms" for arm in ("off", "on")),
            each["ratio"],
            f"{predicted['off'] / predicted['on']:.2f}",
            *(f"{1e3 * each['waited'][arm]:.0f} ms" for arm in ("off", "on")),
            "" if hidden is None else f"{100 * hidden:.0f} %",
        ]
        lines.append("| " + " | ".join(cells) + " |")
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
        link = "as fast as it goes" if each["rate"] is None else f"{each['rate']:.0f} Mbit/s"
        lines += [f"- {link}:", *(f"    - {text}" for text in each["said"])]
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
