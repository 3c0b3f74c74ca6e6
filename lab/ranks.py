"""Harness of benchmarks on throttled links: processes whose links change rate, and arms timed in turn."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lab.network import Delays
from mindspeed_lite.bench.statistics import paired_ratio
from mindspeed_lite.bench.wording import interval


class Rates(NamedTuple):
    """Sets the rates of all links from within the ranks."""

    links: Delays

    def set(self, megabits: float | None, within: float | None = None) -> tuple[float | None, float | None]:
        """Set rank 0's rates on all ranks and return them; a collective call."""
        found: list[Any] = [(megabits, within)]
        dist.broadcast_object_list(found)
        dist.barrier()
        self.links.set_rate(*found[0])
        dist.barrier()
        megabits, within = found[0]
        return megabits, within


def on_ranks(ranks: int, body: Callable[[Rates], Any], ranks_per_host: int = 1) -> Any:
    """Fork ranks, each on a core if there are enough; returns what `body` returns on rank 0, through JSON.

    Raises SystemExit if a rank fails.
    """
    out = Path(tempfile.mkdtemp())
    for rank in range(ranks):
        if os.fork() == 0:
            try:
                links = Delays(ranks_per_host=ranks_per_host)
                links.enter()
                torch.set_num_threads(1)
                cores = sorted(os.sched_getaffinity(0))
                if ranks <= len(cores):
                    os.sched_setaffinity(0, {cores[rank]})
                dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=ranks)
                found = body(Rates(links))
                if rank == 0:
                    (out / "results.json").write_text(json.dumps(found))
                dist.barrier()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
    if any([os.wait()[1] for _ in range(ranks)]):
        raise SystemExit("a rank failed")
    return json.loads((out / "results.json").read_text())


def use_device_layer() -> None:
    """Let Megatron run on these ranks as `mindspeed-lite run` does, and log warnings only."""
    from mindspeed_lite import platform

    logging.getLogger("megatron").setLevel(logging.WARNING)
    platform.activate()


def gathered(value: Any) -> list[Any]:
    """That of every rank; a collective call."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def timed(call: Callable[[], object], record: contextlib.AbstractContextManager[Any] | None = None) -> float:
    """Seconds of a call that all ranks begin together, within `record`."""
    dist.barrier()
    with record or contextlib.nullcontext():
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


def slowest(seconds: float) -> float:
    """The largest value of any rank; a collective call."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


class Measure(NamedTuple):
    """One run of an arm on this rank: its seconds, and those of them that it waited for messages."""

    seconds: float
    waited: float = 0.0


def ratio_in_words(numerators: Sequence[float], denominators: Sequence[float]) -> str:
    found = paired_ratio(numerators, denominators)
    return "-" if found is None else interval(found.ratio, found.low, found.high)


def compare(arms: Sequence[str], repeats: int, run: Callable[[str], Measure]) -> dict[str, Any]:
    """Time two arms in turn (A B A B) on all ranks, after one round of warm-up; a collective call.

    Returns:
        `seconds`: median of each arm, of the slowest rank of each run. `waited`: largest median of any rank.
        `ratio`: first arm / second, in words with its 95 % interval.
    """
    own: dict[str, list[Measure]] = {arm: [] for arm in arms}
    for repeat in range(repeats + 1):
        for arm in arms:
            measured = run(arm)
            if repeat:
                own[arm].append(measured)
    ranks = gathered(own)
    seconds = {
        arm: [max(each.seconds for each in one) for one in zip(*(r[arm] for r in ranks), strict=True)] for arm in arms
    }
    return {
        "seconds": {arm: statistics.median(each) for arm, each in seconds.items()},
        "waited": {arm: max(statistics.median(each.waited for each in r[arm]) for r in ranks) for arm in arms},
        "ratio": ratio_in_words(*(seconds[arm] for arm in arms)),
    }
