"""Measures what a training takes beside its operators: short trainings, and what is left of their steps.

Three of one process differ in layers and micro-batches, so that a layer's part, a micro-batch's and a step's can be
told apart. Two of two processes, where there are as many cores, say what a layer takes beside its messages where ranks
split the sequence or the experts: waiting for the slower rank, reordering, and operators that one rank has no use for.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_lite.bench import harness
from mindspeed_lite.bench.calibration.run import CalibrationError
from mindspeed_lite.bench.harness import Job
from mindspeed_lite.bench.plan import Arm
from mindspeed_lite.planner import arguments, calibrated, step_time
from mindspeed_lite.planner.step_time import Pricer

WORDS = (
    "--hidden-size 256 --ffn-hidden-size 768 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 1 --vocab-size 2047 --bf16 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer "
    "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --train-iters 1000 "
    "--log-interval 1 --eval-iters 1 --eval-interval 1000 --split 90,5,5 --seed 1234 --use-flash-attn "
    "--use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb --use-fused-cross-entropy --use-fused-adamw"
)
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type none --moe-router-force-load-balancing --moe-grouped-gemm --moe-permute-fusion"
)
# Category of messages -> (flags, global batch size for SPLIT_COUNT micro-batches on two ranks).
SPLIT_LAYERS, SPLIT_COUNT = 4, 2
SPLIT = {
    "context parallel": ("--context-parallel-size 2 --context-parallel-algo ulysses_cp_algo", SPLIT_COUNT),
    "expert parallel": (f"{EXPERTS} --expert-model-parallel-size 2", 2 * SPLIT_COUNT),
}
# (layers, micro-batches)
SHAPES = ((2, 1), (6, 1), (2, 4))


def measured_step(command: list[str], folder: Path, steps: int, timeout: float = 300.0) -> float:
    """Seconds of a step, the median; CalibrationError if the command does not run."""
    environment = {"OMP_NUM_THREADS": "1", "MINDSPEED_LITE_DEVICE": "cpu"}
    job = Job(tuple(command), folder, 2, steps, timeout, "keep", environment)
    outcome = harness.run(job, Arm("measured", "given"), 1)
    if outcome.status != "ok":
        raise CalibrationError(f"{' '.join(command[:3])}: {outcome.reason}")
    # Those of a step's slowest rank.
    rows = zip(*(process.steps[-steps:] for process in outcome.processes), strict=False)
    return float(statistics.median(max(each["seconds"] for each in row) for row in rows))


def overheads(measured: Mapping[str, Any], script: str, steps: int = 8) -> dict[str, Any]:
    """Seconds of a layer, a micro-batch and a step beside what operators take; what is measured as less is 0.

    `split`: those of a layer that two ranks split, by the category of their messages.
    """

    with tempfile.TemporaryDirectory(prefix="mindspeed-lite-probe-") as name:
        folder = Path(name)
        file = folder / "calibration.json"
        file.write_text(json.dumps(dict(measured)))
        pricer = Pricer(calibrated.read(file, 1), 0.0)
        left = []
        for layers, count in SHAPES:
            words = [*WORDS.split(), "--num-layers", str(layers), "--global-batch-size", str(count)]
            seconds = measured_step([sys.executable, script, *words], folder / f"{layers}-{count}", steps)
            left.append(seconds - step_time.step(arguments.read(words, 1, "cpu"), pricer).seconds)
        (few, one), (many, _), (_, more) = SHAPES
        layer = max(0.0, (left[1] - left[0]) / (many - few) / one)
        microbatch = max(0.0, (left[2] - left[0]) / (more - one) - few * layer)
        found: dict[str, Any] = {"layer": layer, "microbatch": microbatch}
        found["step"] = max(0.0, left[0] - few * layer - microbatch)
        if measured["cores"] > 1 and "2" in measured["operators"]:
            file.write_text(json.dumps({**measured, "overheads": found}))
            found["split"] = _split(script, Pricer(calibrated.read(file, 2), measured["overlap"]), folder, steps)
        return found


def _split(script: str, pricer: Pricer, folder: Path, steps: int) -> dict[str, float]:
    """Seconds of a layer of one micro-batch that two ranks split, beside all that is predicted of it."""
    found = {}
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script]
    for category, (flags, batch) in SPLIT.items():
        words = [*WORDS.split(), *flags.split(), "--num-layers", str(SPLIT_LAYERS), "--global-batch-size", str(batch)]
        seconds = measured_step([*start, *words], folder / category.replace(" ", "-"), steps)
        left = seconds - step_time.step(arguments.read(words, 2, "cpu"), pricer).seconds
        found[category] = max(0.0, left / SPLIT_LAYERS / SPLIT_COUNT)
    return found
