"""`@forked(...)`: a test runs in a process of its own, forked from one that has made the slow imports.

The device layer changes torch, and features change Megatron, for a whole process. A fork costs milliseconds where
a fresh interpreter costs seconds. The server is this module run with the name of what it imports first; it never
installs anything and computes nothing, so every fork starts from an untouched torch and an untouched Megatron.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import inspect
import os
import pickle
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tests.harness import seeds
from tests.harness.checkouts import ROOT

Test = TypeVar("Test", bound=Callable[..., Any])

PRELOADED = {
    "torch": ("pytest", "torch", "torch.distributed", "torch.utils.data"),
    # All that Megatron imports, but not Megatron.
    "features": (
        "pytest",
        "torch._dynamo",
        "torch._inductor.compile_fx",
        "torch.distributed.checkpoint",
        "torch.distributed.tensor",
        "torch.testing",
        "tests.harness.features",
    ),
    "megatron": (
        "pytest",
        "megatron.training.arguments",
        "megatron.training.yaml_arguments",
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.transformer.moe.moe_utils",
        "megatron.core.optimizer.distrib_optimizer",
        "tests.harness.core_loop",
        "tests.harness.planned",
    ),
}
_CORE = (
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.transformer.moe.token_dispatcher",
    "megatron.core.dist_checkpointing",
    "megatron.core.datasets.gpt_dataset",
    "torch._dynamo",
    "tests.harness.core_loop",
    "tests.harness.jobs",
    "tests.harness.simulated",
)
_TRAINING = ("megatron.training", "megatron.training.training", "megatron.training.yaml_arguments")
# For trainings: Megatron's core alone, and with its script's loop.
PRELOADED["core"], PRELOADED["training"] = ((*each, "tests.harness.planned") for each in (_CORE, (*_CORE, *_TRAINING)))
# Seconds; ranks that wait for each other must be ended before the test they belong to.
TIMEOUT = 500
RANK_TIMEOUT = 300
_servers: dict[str, Server] = {}


def clean_environment(**given: str) -> dict[str, str]:
    """This process's environment without our own variables, on the CPU, with the checkout first on the path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MINDSPEED_LITE_")}
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "COLUMNS"):
        kept.pop(name, None)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    fixed = {
        "PYTHONPATH": path,
        "MINDSPEED_LITE_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    return {**kept, **fixed, **given}


def forked(preloaded: str = "torch", **environment: str) -> Callable[[Test], Test]:
    """Run the decorated test in a fork of a process that has imported `preloaded`; its arguments are pickled."""

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            _check_pickled(test, arguments)
            if preloaded not in _servers:
                _servers[preloaded] = Server(preloaded)
            status, text = _servers[preloaded].ask(test.__module__, test.__name__, arguments, environment)
            if status == "skipped":
                import pytest

                pytest.skip(text)
            if status != "passed":
                raise AssertionError(f"in a process of its own:\n{text}")

        return run  # type: ignore[return-value]

    return decorate


def _check_pickled(test: Any, arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            raise TypeError(
                f"@forked pickles the arguments of {test.__name__}, and `{name}` cannot be pickled ({error}): do in "
                "the test what this fixture does, such as contextlib.redirect_stdout for capsys"
            ) from None


class Server:
    """A process that has imported `PRELOADED[preloaded]` and forks one for each request.

    environment: its variables. errors: a file for standard error.
    """

    def __init__(self, preloaded: str, environment: Mapping[str, str] | None = None, errors: Any = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.processes", preloaded],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if errors is None else errors,
            cwd=ROOT,
            env=clean_environment() if environment is None else environment,
        )
        atexit.register(self.process.terminate)

    def ask(
        self,
        module: str,
        name: str,
        arguments: dict[str, Any],
        environment: Mapping[str, str] | None = None,
        timeout: float = TIMEOUT,
        is_forked: bool = True,
    ) -> tuple[str, Any]:
        """("passed", what `module.name(**arguments)` returned), ("failed", its traceback) or ("skipped", why).

        is_forked: or else it runs in the server, for what changes nothing there and ends in time.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        request = (module, name, arguments, {**(environment or {})})
        pickle.dump((timeout if is_forked else None, request), self.process.stdin)
        self.process.stdin.flush()
        answer: tuple[str, Any] = pickle.load(self.process.stdout)
        return answer


def on_ranks(count: int, body: Callable[[int], None], seconds: float = RANK_TIMEOUT) -> None:
    """Fork `count` processes, run `body(rank)` in each, and fail with every rank's traceback if one fails.

    seconds: what a rank has for it, at most TIMEOUT.
    """
    waiting = [_fork(functools.partial(body, rank)) for rank in range(count)]
    deadline = time.monotonic() + seconds
    answers = [_wait(*each, deadline - time.monotonic()) for each in waiting]
    failed = [f"rank {rank}: {text}" for rank, (status, text) in enumerate(answers) if status != "passed"]
    assert not failed, "\n".join(failed)


def _fork(body: Callable[[], Any]) -> tuple[int, int]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    answer = _answer(body)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    with os.fdopen(writing, "wb") as pipe:
        pickle.dump(answer, pipe)
    os._exit(0)


def _answer(body: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return "passed", body()
    except BaseException as error:
        skipped = type(error).__name__ == "Skipped"
        return ("skipped", str(error)) if skipped else ("failed", traceback.format_exc())


def _wait(pid: int, reading: int, timeout: float) -> tuple[str, Any]:
    received, deadline = b"", time.monotonic() + timeout
    while True:
        if not select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
            os.kill(pid, signal.SIGKILL)
            break
        chunk = os.read(reading, 1 << 16)
        received += chunk
        if not chunk:
            break
    os.close(reading)
    _, status = os.waitpid(pid, 0)
    if received:
        answer: tuple[str, Any] = pickle.loads(received)
        return answer
    return "failed", f"the process ended without an answer: {os.waitstatus_to_exitcode(status)}"


def _run(module: str, name: str, arguments: dict[str, Any], environment: dict[str, str]) -> Any:
    os.environ.update(environment)
    seeds.seed()
    return inspect.unwrap(getattr(importlib.import_module(module), name))(**arguments)


def main() -> None:
    # Standard output carries the answers; what the imports and the tests print must not.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for name in PRELOADED[sys.argv[1]]:
        importlib.import_module(name)
    if sys.argv[1] == "megatron":
        # Megatron compiles its fused functions, in every fork anew; they are arithmetic, and not what is tested.
        importlib.import_module("torch").compiler.set_stance("force_eager")
    # What is loaded now lives as long as the process: collecting garbage in the forks need not look at it.
    gc.freeze()
    while True:
        try:
            timeout, request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        body = functools.partial(_run, *request)
        pickle.dump(_answer(body) if timeout is None else _wait(*_fork(body), timeout), answers)
        answers.flush()


if __name__ == "__main__":
    main()
