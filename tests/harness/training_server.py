"""Runs many short training jobs on one imported Megatron: import once, fork every rank.

Started as `python -m tests.harness.training_server` with the Megatron release first on PYTHONPATH. Reads one JSON job a
line from standard input, forks `nproc` ranks, waits, and answers one JSON line:

    {"nproc": 2, "entry": "core" | "script", "options": {...} | "argv": [...], "arm": "device" | "adaptor" |
     "features", "flags": {...}, "out": DIR, "timeout": SECONDS, "env": {...}, "kill_when": {...}, "compile": BOOL,
     "before": "FUNCTION MODULE:FUNCTION", "grace": SECONDS}

`entry` "core" trains `tests.harness.core_loop` with `options`; "script" runs `argv[0]` as `__main__`. `arm`:
"device" puts only the device layer on, "adaptor" imports the adaptor line, "features" calls
`mindspeed_lite.enable(**flags)`. Each rank writes OUT/rank<N>.log and OUT/rank<N>.json, the history of exact
losses and gradient norms. `compile`: let Megatron's fused functions compile, which every process does anew and which
takes most of a short job's time; without it they run as they are written. `before`: called before features are turned
on; those without a module are in `tests.harness.simulated`. `grace`: what the others have once a rank has failed, 3
unless given. `kill_when` {"path": P} or {"log": TEXT} sends SIGKILL to every rank as soon as the path exists or the log
of the last rank, which logs the iterations, holds the text.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PREPARED = (
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.transformer.moe.token_dispatcher",
    "megatron.core.dist_checkpointing",
    "megatron.core.datasets.gpt_dataset",
    "torch._dynamo",
)
PLANNED = "tests.harness.planned"
PREPARED_TRAINING = ("megatron.training", "megatron.training.training", "megatron.training.yaml_arguments")


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


def _rank(job: dict[str, Any], rank: int, port: int) -> None:
    out = Path(job["out"])
    log = os.open(out / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job["nproc"]),
        LOCAL_WORLD_SIZE=str(job["nproc"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        **job.get("env", {}),
    )
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
    return log.exists() and condition["log"] in log.read_text(errors="replace")


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Fork the ranks of `job` and wait; the first failure or the timeout ends them all."""
    with _held_port() as port:
        return _run(job, port)


def _run(job: dict[str, Any], port: int) -> dict[str, Any]:
    out = Path(job["out"])
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    ranks: dict[int, int] = {}
    for rank in range(job["nproc"]):
        pid = os.fork()
        if pid == 0:
            code = 1
            os.setpgid(0, 0)
            try:
                try:
                    _rank(job, rank, port)
                    code = 0
                except Exception as error:
                    # As the interpreter does at its end.
                    sys.excepthook(type(error), error, error.__traceback__)
            except SystemExit as ending:
                code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
            except BaseException:
                traceback.print_exc()
            finally:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # whoever of the two is first
        ranks[pid] = rank
    codes: dict[int, int] = {}
    deadline = started + job.get("timeout", 600)
    kill_when = job.get("kill_when")
    try:
        while len(codes) < len(ranks):
            running = [pid for pid in ranks if ranks[pid] not in codes]
            for pid in running:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[ranks[pid]] = os.waitstatus_to_exitcode(status)
            if any(codes.values()):
                # A rank that failed leaves the others waiting in a collective; give them a moment to say why.
                deadline = min(deadline, time.monotonic() + job.get("grace", 10))
            if time.monotonic() > deadline or (
                kill_when and _is_time_to_kill(kill_when, out / f"rank{job['nproc'] - 1}.log")
            ):
                for pid in running:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                deadline = float("inf")
                kill_when = None
            time.sleep(0.002 if kill_when else 0.02)
    finally:
        # Megatron writes checkpoints in processes that outlive a rank which is killed, or ends without a farewell.
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
    return {"codes": [codes[rank] for rank in sorted(codes)], "seconds": round(time.monotonic() - started, 2)}


def main() -> None:
    # Standard output carries the answers; whatever Megatron prints while it is imported must not.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for name in (*PREPARED, *(PREPARED_TRAINING if "--training" in sys.argv else ()), PLANNED):
        importlib.import_module(name)
    from megatron.core.package_info import __version__

    # What is loaded now lives as long as the process: collecting garbage in the forks need not look at it.
    gc.freeze()
    answers.write(json.dumps({"ready": __version__}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(run(json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
