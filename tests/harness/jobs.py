"""Short training jobs on one imported Megatron: `run(job)` forks every rank and waits (`tests.harness.processes`).

A job is a dictionary:

    {"nproc": 2, "entry": "core" | "script", "options": {...} | "argv": [...], "arm": "device" | "adaptor" |
     "features", "flags": {...}, "out": DIR, "timeout": SECONDS, "env": {...}, "kill_when": {...}, "compile": BOOL,
     "before": "FUNCTION MODULE:FUNCTION", "grace": SECONDS}

`entry` "core" trains `tests.harness.core_loop` with `options`; "script" runs `argv[0]` as `__main__`. `arm`:
"device" puts only the device layer on, "adaptor" imports the adaptor line, "features" calls
`mindspeed_lite.enable(**flags)`. Each rank writes OUT/rank<N>.log and OUT/rank<N>.json, the history of exact
losses and gradient norms. `compile`: let Megatron's fused functions compile, which every process does anew and which
takes most of a short job's time; without it they run as they are written. `before`: called before features are turned
on; those without a module are in `tests.harness.simulated`. `grace`: what the others have once a rank has failed, 10
unless given. `kill_when` {"path": P} or {"log": TEXT} sends SIGKILL to every rank as soon as the path exists or the log
of the last rank, which logs the iterations, holds the text.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.harness import ranks


@contextlib.contextmanager
def _held_port() -> Iterator[int]:
    """A port that the system gives nobody else meanwhile; torch's store, which reuses addresses, may listen there."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield int(held.getsockname()[1])


def _record_training_log(history: list[dict[str, str]]) -> None:
    """Exact values of what Megatron's training loop logs: it prints seven digits."""
    training = sys.modules.get("megatron.training.training")
    if training is None:
        return
    wrapped = training.training_log
    signature = inspect.signature(wrapped)

    def training_log(loss_dict: Any, *args: Any, **kwargs: Any) -> Any:
        norm = signature.bind(loss_dict, *args, **kwargs).arguments["grad_norm"]
        known = loss_dict if norm is None else {**loss_dict, "grad norm": norm}
        history.append({name: float(value).hex() for name, value in known.items()})
        return wrapped(loss_dict, *args, **kwargs)

    training.training_log = training_log


def _fork_helpers() -> None:
    """Megatron saves through a process that it spawns, which imports the script anew: fork it."""
    saving = sys.modules.get("megatron.core.dist_checkpointing.strategies.filesystem_async")
    queue = inspect.unwrap(getattr(saving, "get_write_results_queue", _fork_helpers))
    if "mp_mode" in inspect.signature(queue).parameters:
        queue.__defaults__ = ("fork",)


def _rank(job: dict[str, Any]) -> None:
    out, rank = Path(job["out"]), os.environ["RANK"]
    import torch

    torch.set_num_threads(1)
    if not job.get("compile"):
        torch.compiler.set_stance("force_eager")
    _fork_helpers()
    for each in job.get("before", "").split():
        module, _, name = each.rpartition(":")
        getattr(importlib.import_module(module or "tests.harness.simulated"), name)()
    if job["arm"] == "device":
        os.environ["MINDSPEED_LITE_DISABLE"] = "1"
        importlib.import_module("mindspeed_lite.platform").activate()
    elif job["arm"] == "adaptor":
        importlib.import_module("mindspeed_lite.megatron_adaptor")
    else:
        importlib.import_module("mindspeed_lite").enable(**job.get("flags", {}))
    history: list[Any] = []
    try:
        if job["entry"] == "core":
            core_loop = importlib.import_module("tests.harness.core_loop")
            history = core_loop.train(job["options"])
            core_loop.destroy()
            places = sorted({place for _, place in core_loop.SYNCHRONIZATIONS.counts})
            (out / f"rank{rank}.synchronizations").write_text("\n".join(places))
        else:
            _record_training_log(history)
            sys.argv = list(job["argv"])
            runpy.run_path(job["argv"][0], run_name="__main__")
    finally:
        (out / f"rank{rank}.json").write_text(json.dumps(history))
        (out / f"rank{rank}.operators").write_text("\n".join(called()))


def called() -> list[str]:
    """The operators of this library that something was computed with."""
    dispatch = sys.modules.get("mindspeed_lite.ops.dispatch")
    packages = {} if dispatch is None else {name: sys.modules.get(path) for name, path in dispatch.OPERATORS.items()}
    return sorted(name for name, package in packages.items() if package is not None and package.OPERATOR._chosen)


def _is_time_to_kill(condition: dict[str, str], log: Path) -> bool:
    if "path" in condition:
        return Path(condition["path"]).exists()
    return "log" in condition and log.exists() and condition["log"] in log.read_text(errors="replace")


def megatron_version() -> str:
    from megatron.core.package_info import __version__

    return str(__version__)


def run(job: dict[str, Any]) -> tuple[list[int], float]:
    """Fork the ranks of `job` and wait; exit codes and seconds. The first failure or the timeout ends them all."""
    out, count = Path(job["out"]), job["nproc"]
    out.mkdir(parents=True, exist_ok=True)
    started, logs = time.monotonic(), [out / f"rank{rank}.log" for rank in range(count)]
    with _held_port() as port:
        common = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **job.get("env", {})}
        pids = [
            ranks.start(functools.partial(_rank, job), log, log, RANK=str(rank), LOCAL_RANK=str(rank), **common)
            for rank, log in enumerate(logs)
        ]
        try:
            is_time = functools.partial(_is_time_to_kill, job.get("kill_when", {}), logs[-1])
            codes = ranks.wait(pids, job["timeout"], is_time, grace=job.get("grace", 10))
        finally:
            # Megatron writes checkpoints in processes that outlive a rank which is killed, or ends without a farewell.
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
    return codes, round(time.monotonic() - started, 2)
