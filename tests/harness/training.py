"""The test side of `training_server`: one server per Megatron release, started when first used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.checkouts import ROOT


@dataclass(frozen=True)
class Result:
    """One finished job: exit codes by rank, logs, and the exact history of each rank."""

    codes: list[int]
    seconds: float
    out: Path

    def history(self, rank: int = -1) -> list[Any]:
        """What rank `rank` recorded; -1 is the last, which holds the loss under pipeline parallelism."""
        found: list[Any] = json.loads((self.out / f"rank{rank % len(self.codes)}.json").read_text())
        return found

    def log(self, rank: int = 0) -> str:
        return (self.out / f"rank{rank % len(self.codes)}.log").read_text(errors="replace")

    def operators(self, rank: int = 0) -> set[str]:
        """The operators of this library that a rank computed with."""
        return set((self.out / f"rank{rank}.operators").read_text().split())

    def check(self) -> Result:
        """This result, or an AssertionError with the end of the failing rank's log."""
        for rank, code in enumerate(self.codes):
            assert code == 0, f"rank {rank} ended with {code}:\n" + "\n".join(self.log(rank).splitlines()[-40:])
        return self


class Trainer:
    """Runs jobs on one release of Megatron."""

    def __init__(self, release: Path | None, scratch: Path, training: bool) -> None:
        self.scratch = scratch
        self._count = 0
        self._done: dict[str, Result] = {}
        path = [str(ROOT), *([str(release)] if release is not None else [])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path[::-1]),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            # Megatron 0.15 is imported here before the device layer, which sets it, is on.
            "TORCH_CUDA_ARCH_LIST": "8.0",
            # Its import compiles under a lock, which a killed process leaves to everybody who shares the folder.
            "TORCH_EXTENSIONS_DIR": str(scratch / "extensions"),
        }
        self._errors = (scratch / "forker.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.training_server", *(["--training"] if training else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        self.version: str = self._answer()["ready"]

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the training server ended:\n" + (self.scratch / "forker.log").read_text()[-3000:]
        return json.loads(line)

    def run(self, **job: Any) -> Result:
        """Run one job (see `training_server`); does not check its outcome."""
        self._count += 1
        out = self.scratch / f"job{self._count}"
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"nproc": 1, "arm": "device", **job, "out": str(out)}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return Result(answer["codes"], answer["seconds"], out)

    def once(self, **job: Any) -> Result:
        """Run one job, or give back what the very same job gave before: runs are reproducible to the bit (see
        test_same_run_twice_is_bitwise_the_same). Fails the test if the run fails."""
        key = json.dumps(job, sort_keys=True)
        if key not in self._done:
            self._done[key] = self.run(**job).check()
        return self._done[key]

    def core(self, arm: str, nproc: int, options: dict[str, Any], **job: Any) -> Result:
        """Train the core loop, the same job once; fails the test if the run fails."""
        return self.once(entry="core", arm=arm, nproc=nproc, options=options, **job)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=120)
        self._errors.close()
