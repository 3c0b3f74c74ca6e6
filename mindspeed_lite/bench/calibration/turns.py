"""The process that has imported Megatron, forks the ranks of short trainings and gives each training its turns.

`python -m mindspeed_lite.bench.calibration.turns JOBS.json`; `trainings.measured_steps` starts it. A training of a few
steps takes a few seconds then, where its start takes ten. Some of them are alive at once, and one at a time is at work.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_lite.bench.calibration.trainings import STEPS, WHY, Training, last_line
from mindspeed_lite.bench.harness import held_port
from mindspeed_lite.bench.plan import Arm, Plan
from mindspeed_lite.bench.probes import train_step

# Imported once, before ranks are forked: most of the start of a script of Megatron's.
IMPORTED = ("torch._dynamo", "megatron.training.training", "megatron.core.models.gpt.gpt_layer_specs")
# Ranks: each has memory of its own, 200 MB about.
ALIVE = 4


# A training behind its place among those that are asked for.
Job = tuple[int, Training]


@dataclass
class ForkedRank:
    """A forked rank. `turn`: it sends a byte when it waits for its turn, and is sent one when it has it."""

    process: int
    turn: socket.socket
    log: Path


def main(file: str) -> None:
    """Run the trainings of a file until the process that started this one ends; one that fails leaves its log."""
    told = json.loads(Path(file).read_text())
    # As Python does for a script: a checkout of Megatron-LM has its own Megatron beside it.
    sys.path.insert(0, str(Path(told["script"]).resolve().parent))
    for name in IMPORTED:
        importlib.import_module(name)
    _compile_once()
    # What is collected is written to, and what is written to is copied in every rank.
    gc.freeze()
    take_turns(told, Path(file).parent, os.getppid())


def take_turns(told: Mapping[str, Any], folder: Path, parent: int) -> None:
    """Start some trainings, as many at once as there are cores, and go round them; then others."""
    cores = len(os.sched_getaffinity(0))
    jobs = [(number, Training(tuple(each["words"]), each["ranks"])) for number, each in enumerate(told["trainings"])]
    for some in _batches(jobs, ALIVE):
        alive: list[list[ForkedRank]] = []
        with held_ports(some) as ports:
            for batch in _batches(some, cores):
                started: list[list[ForkedRank]] = []
                for number, training in batch:
                    others = [rank for ranks in [*alive, *started] for rank in ranks]
                    started.append(_started(told, training, folder / str(number), ports[number], others))
                alive += [ranks for ranks in started if arrived(ranks, told["timeout"], parent)]
        for _ in range(told["turns"]):
            for ranks in [*alive]:
                for rank in ranks:
                    with contextlib.suppress(OSError):
                        rank.turn.send(b".")
                if not arrived(ranks, told["timeout"], parent):
                    alive.remove(ranks)
        if os.getppid() != parent:
            return


@contextlib.contextmanager
def held_ports(jobs: Sequence[Job]) -> Iterator[dict[int, int]]:
    """A port for each, by its number."""
    with contextlib.ExitStack() as held:
        yield {number: held.enter_context(held_port()) for number, _ in jobs}


def _compile_once() -> None:
    """Let the compiler look at this machine once, and not in every rank."""
    import torch

    # A rank that needs the compiler, and has none, says so.
    with contextlib.suppress(Exception):
        torch.compile(lambda x: x + 1)(torch.zeros(8))


def _batches(jobs: Sequence[Job], most: int) -> Iterator[list[Job]]:
    """Neighbours that have no more ranks together, or one alone."""
    batch: list[Job] = []
    for number, training in jobs:
        if batch and sum(other.ranks for _, other in batch) + training.ranks > most:
            yield batch
            batch = []
        batch.append((number, training))
    if batch:
        yield batch


def _started(
    told: Mapping[str, Any], training: Training, folder: Path, port: int, others: Sequence[ForkedRank]
) -> list[ForkedRank]:
    folder.mkdir()
    plan = Plan(
        Arm("measured", "given"), str(folder), told["warmup"], told["turns"] * STEPS, False, "", "keep", time.time(),
        str(Path(__file__).parents[3]),
    )  # fmt: skip
    plan.write(folder / "plan.json")
    found: list[ForkedRank] = []
    for rank in range(training.ranks):
        variables = {
            "RANK": str(rank), "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(training.ranks), "LOCAL_WORLD_SIZE": str(training.ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        found.append(_forked([told["script"], *training.words], variables, plan, folder, [*others, *found]))
    return found


def _forked(
    argv: list[str], variables: Mapping[str, str], plan: Plan, folder: Path, others: Sequence[ForkedRank]
) -> ForkedRank:
    """A process of the script; its output goes to `rank<N>.log` in the folder."""
    ours, theirs = socket.socketpair()
    path = folder / f"rank{variables['RANK']}.log"
    process = os.fork()
    if process:
        theirs.close()
        return ForkedRank(process, ours, path)
    code = 1
    try:
        # Or the end of the process that gives turns would not be seen.
        for each in (ours, *(other.turn for other in others)):
            each.close()
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= variables
        from mindspeed_lite.bench import worker

        worker.start(str(folder / "plan.json"))
        core = int(variables["RANK"]) if int(variables["WORLD_SIZE"]) <= len(os.sched_getaffinity(0)) else None
        train_step.around_steps("turns", "trainings take turns", _Turns(plan.warmup, theirs, core).around)
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


class _Turns:
    """In a rank: waits before the first step of every turn. Before the first turn it takes the core that it is given.

    Threads of gloo's have started then, and run where they may.
    """

    def __init__(self, warmup: int, turn: socket.socket, core: int | None) -> None:
        self._warmup, self._turn, self._core, self._done = warmup, turn, core, 0

    def around(self, wrapped: Callable[..., Any], session: object) -> Callable[..., Any]:
        def train_step(*args: Any, **kwargs: Any) -> Any:
            measured = self._done - self._warmup
            if measured == 0 and self._core is not None:
                os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[self._core]})
            if measured >= 0 and measured % STEPS == 0:
                self._turn.send(b".")
                if not self._turn.recv(1):
                    os._exit(1)
            self._done += 1
            return wrapped(*args, **kwargs)

        return train_step


def arrived(ranks: Sequence[ForkedRank], timeout: float, parent: int) -> bool:
    """Whether every rank waits for its next turn; otherwise all have ended.

    The first that fails, the end of the time, and that of the parent end the others; the folder of logs says why.
    """
    waiting, ended, why, by_signal = list(ranks), [], "", ""
    end = time.monotonic() + timeout
    while waiting and time.monotonic() < end and os.getppid() == parent:
        for each in select.select([rank.turn for rank in waiting], [], [], 0.02)[0]:
            # A rank that died before it read that it has its turn resets the connection.
            with contextlib.suppress(ConnectionError):
                if each.recv(1):
                    waiting = [rank for rank in waiting if rank.turn is not each]
        for rank in [*waiting]:
            process, status = os.waitpid(rank.process, os.WNOHANG)
            if process:
                waiting.remove(rank)
                ended.append(rank)
            code = os.waitstatus_to_exitcode(status)
            if code < 0 and not by_signal:
                why = by_signal = f"{signal.Signals(-code).name} ended a rank"
            elif code and not why:
                why = last_line(rank.log) or f"a rank ended with status {code}"
            if code:
                # The others wait for it in a collective; a moment to say so.
                end = min(end, time.monotonic() + 1.0)
    if not waiting and not ended:
        return True
    if waiting and not why:
        why = f"a rank has not answered for {timeout:.0f} s"
    (ranks[0].log.parent / WHY).write_text(why)
    for rank in ranks:
        if rank not in ended:
            os.kill(rank.process, signal.SIGKILL)
            os.waitpid(rank.process, 0)
    return False


if __name__ == "__main__":
    main(sys.argv[1])
