"""Runs short trainings of a script one after the other, their ranks forked from a process that has imported Megatron.

A training of ten steps takes a few seconds then, where its start takes ten. Run as
`python -m mindspeed_lite.bench.calibration.trainings JOBS.json`; `measured_steps` starts it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mindspeed_lite.bench import records
from mindspeed_lite.bench.calibration.run import CalibrationError
from mindspeed_lite.bench.harness import held_port
from mindspeed_lite.bench.plan import Arm, Plan
from mindspeed_lite.child_process import child_process

# Imported once, before ranks are forked: most of the start of a script of Megatron's.
IMPORTED = ("torch._dynamo", "megatron.training.training", "megatron.core.models.gpt.gpt_layer_specs")
_TAIL = 400


@dataclass(frozen=True)
class Training:
    """A script's arguments, and on how many processes they run."""

    words: tuple[str, ...]
    ranks: int = 1


def measured_steps(
    script: str, trainings: Sequence[Training], folder: Path, steps: int, warmup: int = 2, timeout: float = 120.0
) -> list[list[float] | str]:
    """Seconds of each step of each training, on its slowest rank; or why there are none, one line.

    Args:
        folder: an empty one, for logs and records.
        timeout: seconds of one training.

    Raises:
        CalibrationError: Megatron cannot be imported, or the trainings did not end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    jobs = folder / "jobs.json"
    given = [asdict(each) for each in trainings]
    told = {"script": script, "steps": steps, "warmup": warmup, "timeout": timeout, "trainings": given}
    jobs.write_text(json.dumps(told))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MINDSPEED_LITE_DEVICE": "cpu"}
    log = folder / "log.txt"
    command = [sys.executable, "-m", __spec__.name, str(jobs)]
    with log.open("w") as output:
        started = child_process(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        with started as process, contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout * (1 + len(trainings)))
    if process.returncode:
        raise CalibrationError(f"{script}: {_last_line(log)}")
    return [_outcome(folder / str(number), each, steps) for number, each in enumerate(trainings)]


def _outcome(folder: Path, training: Training, steps: int) -> list[float] | str:
    processes = records.read(folder)
    if len(processes) == training.ranks and all(len(each.steps) >= steps and each.ended for each in processes):
        rows = zip(*(each.steps[-steps:] for each in processes), strict=True)
        return [max(each["seconds"] for each in row) for row in rows]
    tails = [_last_line(folder / f"rank{rank}.log") for rank in range(training.ranks)]
    return next((each for each in tails if each), "it ended without its steps")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.is_file() else []
    return next((each.strip()[-_TAIL:] for each in reversed(lines) if each.strip()), "")


def main(file: str) -> None:
    """Run the trainings of a file until the process that started this one ends; one that fails leaves its log."""
    parent = os.getppid()
    told = json.loads(Path(file).read_text())
    # As Python does for a script: a checkout of Megatron-LM has its own Megatron beside it.
    sys.path.insert(0, str(Path(told["script"]).resolve().parent))
    for name in IMPORTED:
        importlib.import_module(name)
    for number, each in enumerate(told["trainings"]):
        folder = Path(file).parent / str(number)
        folder.mkdir()
        plan = Plan(
            Arm("measured", "given"), str(folder), told["warmup"], told["steps"], False, "", "keep", time.time(),
            str(Path(__file__).parents[3]),
        )  # fmt: skip
        plan.write(folder / "plan.json")
        with held_port() as port:
            argv = [told["script"], *each["words"]]
            ranks = [_forked(argv, rank, each["ranks"], port, folder) for rank in range(each["ranks"])]
            _wait(ranks, told["timeout"], parent)
        if os.getppid() != parent:
            return


def _forked(argv: list[str], rank: int, ranks: int, port: int, folder: Path) -> int:
    """The process of a rank; its output goes to `rank<N>.log` in the folder."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        from mindspeed_lite.bench import worker

        worker.start(str(folder / "plan.json"))
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if isinstance(ending.code, str):
            print(ending.code, flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait(ranks: Sequence[int], timeout: float, parent: int) -> None:
    """Until all have ended; the first that fails, the end of the time, and that of the parent end the others."""
    running, end = list(ranks), time.monotonic() + timeout
    while running:
        for each in [*running]:
            done, status = os.waitpid(each, os.WNOHANG)
            if done:
                running.remove(each)
                if status:
                    # The others wait for it in a collective; a moment to say so.
                    end = min(end, time.monotonic() + 1.0)
        if time.monotonic() > end or os.getppid() != parent:
            for each in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            end = float("inf")
        time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1])
