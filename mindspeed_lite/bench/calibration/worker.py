"""A process of a calibration: times operators alone and together with the others, then collectives; rank 0 writes."""

from __future__ import annotations

import functools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_lite import platform
from mindspeed_lite.bench.calibration import operators
from mindspeed_lite.bench.calibration.operators import Case
from mindspeed_lite.bench.calibration.samples import undisturbed
from mindspeed_lite.platform import allocator

SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23)
PASSES = 3
# Computed before each message, give or take a third: the other rank's core is then busy when gloo's thread wants it,
# as in a training.
_BETWEEN = 2e-3
# Calls of a message, however few seconds there are.
LEAST = 10


def main(rank: int, ranks: int, folder: Path, seconds: float) -> None:
    """Measure, and on rank 0 write `measured.json` into the folder.

    seconds: of the whole measurement, about.
    """
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    random.seed(rank)
    platform.activate("cpu")
    # As `mindspeed-lite run` starts a training.
    allocator.keep_freed_memory()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    # After gloo has started its threads, which run where they may, as in a training.
    cores = os.sched_getaffinity(0)
    if ranks <= len(cores):
        os.sched_setaffinity(0, {sorted(cores)[rank]})
    # About three hundred cases, twice; and messages.
    each = seconds / 700
    found: dict[str, Any] = {"operators": {}}
    if rank == 0:
        found["operators"]["1"] = timed(_all, each)
    dist.barrier()
    if ranks > 1:
        found["operators"][str(ranks)] = timed(_all, each)
        dist.barrier()
    os.sched_setaffinity(0, cores)
    found["collectives"] = collectives(each)
    if rank == 0:
        (folder / "measured.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _all() -> Iterable[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        yield from operators.cases(dtype)
    yield from operators.optimizers()


def timed(cases: Callable[[], Iterable[Case]], seconds: float) -> list[dict[str, Any]]:
    """Each case's seconds of an undisturbed call, from calls that take so many seconds together.

    They are spread over passes of all cases: what disturbs a machine for a second disturbs one pass of a case.
    """
    made = [*cases()]
    samples: list[list[float]] = [[] for _ in made]
    for case in made:
        case.run()
    for _ in range(PASSES):
        for taken, case in zip(samples, made, strict=True):
            taken += _samples(case.run, seconds / PASSES)
    return [
        {"key": case.key, "shape": case.shape, "work": case.work, "seconds": undisturbed(taken)}
        for taken, case in zip(samples, made, strict=True)
    ]


def _samples(run: Callable[[], object], seconds: float) -> list[float]:
    samples: list[float] = []
    began = time.perf_counter()
    while not samples or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    return samples


def collectives(seconds: float) -> list[dict[str, Any]]:
    """Messages among all ranks, and among the first two of more, by size; every rank takes part in each."""
    ranks = dist.get_world_size()
    found: list[dict[str, Any]] = []
    for size in sorted({2, ranks} if ranks > 1 else ()):
        group = dist.new_group(list(range(size)))
        if dist.get_rank() < size:
            found += _of_group(group, size, seconds)
        dist.barrier()
    return found


def _of_group(group: Any, size: int, seconds: float) -> list[dict[str, Any]]:
    found = []
    for nbytes in SIZES:
        whole = torch.zeros(nbytes // 4 // size * size)
        part = torch.zeros(whole.numel() // size)
        runs: dict[str, Callable[[], object]] = {
            "all_reduce": functools.partial(dist.all_reduce, whole, group=group),
            "all_gather": functools.partial(dist.all_gather_into_tensor, whole, part, group=group),
            "reduce_scatter": functools.partial(dist.reduce_scatter_tensor, part, whole, group=group),
            "all_to_all": functools.partial(_exchange, whole, group),
            "send": functools.partial(_there_and_back, whole, group),
        }
        for kind, run in runs.items():
            if kind == "send" and size != 2:
                continue
            taken = _together(run, seconds * 5, group) / (2 if kind == "send" else 1)
            found.append({"kind": kind, "ranks": size, "bytes": whole.numel() * 4, "seconds": taken, "width": 4})
        # A reduction is computed, and in bfloat16 it takes longer for each byte; what moves bytes does not.
        for kind in ("all_reduce", "reduce_scatter"):
            wide, narrow = (each.new_zeros(each.numel() * 2, dtype=torch.bfloat16) for each in (whole, part))
            run = {
                "all_reduce": functools.partial(dist.all_reduce, wide, group=group),
                "reduce_scatter": functools.partial(dist.reduce_scatter_tensor, narrow, wide, group=group),
            }[kind]
            taken = _together(run, seconds * 5, group)
            found.append({"kind": kind, "ranks": size, "bytes": wide.numel() * 2, "seconds": taken, "width": 2})
    return found


def _exchange(tensor: torch.Tensor, group: Any) -> None:
    dist.all_to_all_single(torch.empty_like(tensor), tensor, group=group)


def _there_and_back(tensor: torch.Tensor, group: Any) -> None:
    first, second = dist.get_process_group_ranks(group)[:2]
    if dist.get_rank() == first:
        dist.send(tensor, second, group=group)
        dist.recv(tensor, second, group=group)
    else:
        dist.recv(tensor, first, group=group)
        dist.send(tensor, first, group=group)


def _together(run: Callable[[], object], seconds: float, group: Any) -> float:
    """The mean of as many calls on every rank, each behind products of about `_BETWEEN` seconds.

    Some calls take ten times the median, since a thread of gloo's waits for a core; a step has many, and takes their
    sum. The slowest of fifty is left out.
    """
    run()
    start = time.perf_counter()
    run()
    calls = torch.tensor([min(200, max(LEAST, int(seconds / (time.perf_counter() - start + _BETWEEN))))])
    dist.broadcast(calls, dist.get_global_rank(group, 0), group=group)
    samples = []
    for _ in range(int(calls)):
        _compute(_BETWEEN * random.uniform(2 / 3, 4 / 3))
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    return statistics.mean(sorted(samples)[: len(samples) - len(samples) // 50])


def _compute(seconds: float) -> None:
    square = torch.ones(128, 128)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        square @ square


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]))
