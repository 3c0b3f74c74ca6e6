"""Trains on one Megatron release: jobs (`tests.harness.jobs`), what they recorded, and how near two trainings are."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.checkouts import ROOT
from tests.harness.processes import Server

SCRIPT = str(ROOT / "examples" / "pretrain_gpt.py")
MODEL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --bf16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 255 --normalization RMSNorm --swiglu --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --log-interval 1 --eval-iters 1 "
    "--eval-interval 100 --seed 42 --split 90,5,5 --num-workers 0"
).split()
NO_DROPOUT = ["--hidden-dropout", "0", "--attention-dropout", "0"]
# Ranks and flags of the script.
LAYOUTS: dict[str, tuple[int, str]] = {
    "single": (1, ""),
    "tp2": (2, "--tensor-model-parallel-size 2 --global-batch-size 4"),
    "tp2_sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel --global-batch-size 4"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp2_vpp2": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4"),
    "dp2_distributed_optimizer": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "ep2": (
        2,
        "--expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
        "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2",
    ),
}

# bf16 keeps 8 bits, so one rounding moves an activation by up to 2^-9 of itself. The losses of two runs that round
# differently drift apart step by step; 2^-8 of the loss holds with room over the steps here, and a wrong mask,
# scale or missing gradient is off by far more.
DRIFT = 2.0**-8
# Gradient norms of such runs: before the first update, of the same weights, and later. AdamW divides by the size of
# gradients, so losses do not show a gradient of a wrong size.
FIRST_NORM, NORM_DRIFT = 2.0**-10, 2.0**-5


# Reads of tensors that are on the host in a training on a device too, or for gloo alone.
READ_ON_THE_HOST = {
    "mindspeed_lite.optim.fused_adam _update",  # the number of steps
    "mindspeed_lite.ops.permute.chunks <genexpr>",
    "mindspeed_lite.ops.grouped_matmul _known",  # counts where they are on the host
    "mindspeed_lite.platform.megatron maybe_move_tensor_to_cpu",
    "mindspeed_lite.parallel.context _compare_lengths",  # on a device in the first call
}


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

    def histories(self) -> list[Any]:
        return [self.history(rank) for rank in range(len(self.codes))]

    def steps(self, rank: int = -1) -> list[tuple[str, str]]:
        """Losses and gradient norms as hexadecimal floats, of either kind of job."""
        found = self.history(rank)
        if found and isinstance(found[0], dict):
            return [(step["lm loss"], step["grad norm"]) for step in found if "lm loss" in step]
        return [(loss, norm) for loss, norm in found if loss not in ("gradients", "evaluation")]

    def losses(self, rank: int = -1) -> list[float]:
        return [float.fromhex(loss) for loss, _ in self.steps(rank)]

    def log(self, rank: int = 0) -> str:
        return (self.out / f"rank{rank % len(self.codes)}.log").read_text(errors="replace")

    def operators(self, rank: int = 0) -> set[str]:
        """The operators of this library that a rank computed with."""
        return set((self.out / f"rank{rank}.operators").read_text().split())

    def synchronizations(self, rank: int = 0) -> list[str]:
        """Places of this library that would read from a device in the last step."""
        places = (self.out / f"rank{rank}.synchronizations").read_text().splitlines()
        ours = [re.sub(r":\d+ ", " ", each) for each in places if each.startswith("mindspeed_lite.")]
        return [each for each in ours if ".cpu " not in each and each not in READ_ON_THE_HOST]

    def check(self) -> Result:
        """This result, or an AssertionError with the end of the failing rank's log."""
        for rank, code in enumerate(self.codes):
            assert code == 0, f"rank {rank} ended with {code}:\n" + "\n".join(self.log(rank).splitlines()[-40:])
        return self


def fault(
    off: Sequence[tuple[str, str]],
    on: Sequence[tuple[str, str]],
    drift: float = DRIFT,
    first_norm: float = FIRST_NORM,
    norm: float | None = None,
) -> str:
    """What is not near in two lists of losses and gradient norms, as hexadecimal floats; "" if all is."""
    if not on or len(on) != len(off):
        return f"{len(on)} steps with it, {len(off)} without"
    norm = NORM_DRIFT * drift / DRIFT if norm is None else norm
    for step, (one, other) in enumerate(zip(off, on, strict=True)):
        bounds = (("loss", drift), ("gradient norm", norm if step else first_norm))
        for (what, bound), x, y in zip(bounds, one, other, strict=True):
            a, b = float.fromhex(x), float.fromhex(y)
            if not abs(a - b) <= bound * abs(a):
                return f"step {step}: {what} {a} off, {b} on: {abs(a - b) / abs(a):.2g}, and {bound:.2g} is allowed"
    return ""


class Trainer:
    """Runs jobs on one release of Megatron, in processes that its server forks."""

    def __init__(self, release: Path | None, scratch: Path, training: bool, packages: str = "") -> None:
        """packages: a folder with packages that this environment has not."""
        self.scratch = scratch
        self._count = 0
        self._done: dict[str, Result] = {}
        path = [str(ROOT), *([str(release)] if release is not None else []), *([packages] if packages else [])]
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
        self._server = Server("training" if training else "core", environment, self._errors)
        self.version: str = self._ask("megatron_version", {})

    def _ask(self, name: str, arguments: dict[str, Any]) -> Any:
        try:
            status, found = self._server.ask("tests.harness.jobs", name, arguments, is_forked=False)
        except EOFError:
            raise AssertionError(
                "the training server ended:\n" + (self.scratch / "forker.log").read_text()[-3000:]
            ) from None
        assert status == "passed", found
        return found

    def run(self, **job: Any) -> Result:
        """Run one job (see `tests.harness.jobs`); does not check its outcome."""
        self._count += 1
        out = self.scratch / f"job{self._count}"
        given = {"nproc": 1, "arm": "device", "timeout": 600, **job, "out": str(out)}
        codes, seconds = self._ask("run", {"job": given})
        return Result(codes, seconds, out)

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

    def script(self, nproc: int, flags: Sequence[str], steps: int = 4, **job: Any) -> Result:
        """Train the example script with the adaptor line; does not check its outcome."""
        argv = [SCRIPT, *MODEL, "--train-iters", str(steps), *flags]
        return self.run(**{"arm": "adaptor", "entry": "script", "nproc": nproc, "argv": argv, **job})

    def script_once(self, nproc: int, flags: Sequence[str], steps: int = 4, **job: Any) -> Result:
        """The same, the same job once; fails the test if the run fails."""
        argv = [SCRIPT, *MODEL, "--train-iters", str(steps), *flags]
        return self.once(**{"arm": "adaptor", "entry": "script", "nproc": nproc, "argv": argv, **job})

    def close(self) -> None:
        # No job runs now, and ending an interpreter with Megatron takes seconds.
        self._server.process.kill()
        self._server.process.wait(timeout=120)
        self._errors.close()
