"""Times operators and collectives of this machine; the result is a file for `planner.calibrated`."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform as python_platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from mindspeed_lite import platform
from mindspeed_lite._version import __version__
from mindspeed_lite.bench.calibration import operators
from mindspeed_lite.bench.timing import Effort, time_one
from mindspeed_lite.planner.calibrated import FORMAT
from mindspeed_lite.platform import allocator

MESSAGE_BYTES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23)
_MESSAGE_CALLS = 30
# Seconds of matmuls before each message: gloo's thread then competes for the core as in training.
_BETWEEN = 2e-3
# Timed cases of a process, which are timed in one and then in all processes together.
_CASES = 286
_POLL = 0.5  # seconds
# Unexplained host time in calls of a small module, forward and backward. Fitted to Megatron-LM 0.19 on a CPU.
HOST_CALLS = {"layer": 85, "microbatch": 140, "step": 65}


class CalibrationError(RuntimeError):
    """A process of the measurement failed; one line."""


def measure(
    ranks: int, seconds: float, tell: Callable[[int, int, str], None] = lambda done, total, what: None
) -> dict[str, Any]:
    """Measure the content of a calibration file.

    Args:
        seconds: approximate repetition time of all operators.
        tell: called with (done, total, what is measured).

    Raises:
        CalibrationError: a process failed.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mindspeed-lite-calibrate-") as folder:
        try:
            processes = spawn(_process, (ranks, folder, seconds / _CASES / 2), ranks, join=False)  # type: ignore[no-untyped-call]
            while not processes.join(_POLL):
                with contextlib.suppress(OSError, ValueError):  # not yet there, or being written
                    tell(*json.loads(Path(folder, "progress.json").read_text()))
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise CalibrationError(f"a process failed: {str(error).strip().splitlines()[-1]}") from None
        found = json.loads(Path(folder, "measured.json").read_text())
    cores = len(os.sched_getaffinity(0))
    return {
        "format": FORMAT,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - began, 1),
        "device": platform.choose("cpu").describe(),
        "kind": "cpu",
        "cores": cores,
        "ranks_per_node": cores,
        # The computing core also runs gloo's messages.
        "overlap": 0.0,
        "versions": {
            "mindspeed_lite": __version__,
            "torch": str(torch.__version__),
            "python": python_platform.python_version(),
        },
        **found,
    }


def _process(rank: int, ranks: int, folder: str, seconds: float) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    platform.activate("cpu")
    allocator.keep_freed_memory()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    cores = os.sched_getaffinity(0)
    if ranks <= len(cores):
        os.sched_setaffinity(0, {sorted(cores)[rank]})
    measured: dict[str, Any] = {"operators": {}}

    def tell(done: int, name: str) -> None:
        if rank == 0:
            place = done + _CASES * ("1" in measured["operators"])
            report = [place, _CASES * min(ranks, 2), name]
            Path(folder, "progress.json").write_text(json.dumps(report))

    if rank == 0:
        measured["overheads"] = host_overheads()
        measured["operators"]["1"] = time_operators(seconds, tell)
    dist.barrier()
    if ranks > 1:
        measured["operators"][str(ranks)] = time_operators(seconds, tell)
        dist.barrier()
    os.sched_setaffinity(0, cores)
    measured["collectives"] = time_collectives(rank, ranks) if ranks > 1 else []
    if rank == 0:
        Path(folder, "measured.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def time_operators(seconds: float, tell: Callable[[int, str], None] = lambda done, name: None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for key, shape, work, run in operators.cases():
        tell(len(found), " ".join(key))
        found.append({"key": key, "shape": shape, "work": work, "seconds": _median_seconds(run, seconds)})
    return found


def host_overheads() -> dict[str, float]:
    """Host seconds of a layer, a micro-batch and a step, from a small module's call."""
    count = 50
    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(count)))
    x, weights = torch.ones(8, 8), tuple(net.parameters())
    call = _median_seconds(lambda: torch.autograd.grad(net(x).sum(), weights), 0.5) / count
    return {name: calls * call for name, calls in HOST_CALLS.items()}


def _median_seconds(run: Callable[[], object], repeated: float) -> float:
    effort = Effort(sample_seconds=repeated / 10, rounds=(1, 100), seconds=repeated, warmup=1)
    return time_one(run, effort).seconds


def time_collectives(rank: int, ranks: int) -> list[dict[str, Any]]:
    """Time collectives by size and dtype, and messages of two ranks."""
    found = []
    pair = dist.new_group([0, 1])

    def exchange() -> None:
        first, second = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
        for run in (first, second):
            run(whole, 1 - rank, group=pair)

    for size, dtype in itertools.product(MESSAGE_BYTES, (torch.float32, torch.bfloat16)):
        whole = torch.zeros(size // dtype.itemsize // ranks * ranks, dtype=dtype)
        part, other = whole.new_zeros(whole.numel() // ranks), torch.empty_like(whole)
        runs: dict[str, Callable[[], object]] = {
            "all_reduce": partial(dist.all_reduce, whole),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole),
        }
        if dtype is torch.float32:  # independent of dtype
            runs["all_gather"] = partial(dist.all_gather_into_tensor, whole, part)
            runs["all_to_all"] = partial(dist.all_to_all_single, other, whole)
            if rank < 2:
                runs["send"] = exchange
        for kind, run in runs.items():
            members, share = (2, 0.5) if kind == "send" else (ranks, 1.0)
            bytes_, seconds = whole.numel() * whole.itemsize, _mean_seconds(run) * share
            found.append({"kind": kind, "ranks": members, "bytes": bytes_, "seconds": seconds, "width": whole.itemsize})
        dist.barrier()
    return found


def _mean_seconds(run: Callable[[], object]) -> float:
    """Mean without the slowest call: training waits for the sum, outliers included."""
    run()
    samples = []
    for _ in range(_MESSAGE_CALLS):
        _compute(_BETWEEN * random.uniform(2 / 3, 4 / 3))
        began = time.perf_counter()
        run()
        samples.append(time.perf_counter() - began)
    return statistics.fmean(sorted(samples)[:-1])


def _compute(seconds: float) -> None:
    square = torch.ones(128, 128)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        square @ square


__all__ = ["CalibrationError", "measure"]
