"""Measures what a training takes beside its operators and messages: short trainings, and what is left of their steps.

Tiny ones of one process differ in layers and micro-batches: what a layer, a micro-batch and a step take where operators
take next to nothing. Larger ones, of one process and of two with a replica each, say how much longer operators take in
a training than alone. Those of two ranks that split tensors, sequence or experts say what a layer takes beside its
messages: waiting for the slower rank, reordering, and operators that one rank has no use for.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_lite.bench.calibration import run
from mindspeed_lite.bench.calibration.run import CalibrationError
from mindspeed_lite.bench.calibration.samples import undisturbed
from mindspeed_lite.bench.calibration.trainings import Training, measured_steps
from mindspeed_lite.planner import arguments, calibrated, step_time
from mindspeed_lite.planner.step_time import Pricer, StepTime
from mindspeed_lite.planner.work import REDUCED

WORDS = (
    "--num-attention-heads 4 --micro-batch-size 1 --vocab-size 2047 --bf16 --lr 1e-4 --mock-data "
    "--tokenizer-type NullTokenizer --normalization RMSNorm --swiglu --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 "
    "--train-iters 1000 --log-interval 1 --eval-iters 0 --eval-interval 1000 --split 90,5,5 --seed 1234 "
    "--use-flash-attn --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb --use-fused-cross-entropy "
    "--use-fused-adamw"
)
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type none --moe-router-force-load-balancing --moe-grouped-gemm --moe-permute-fusion"
)
# (layers, micro-batches)
TINY = ((2, 1), (10, 1), (2, 6))
# (width, layers, micro-batches of a replica)
WHOLE = ((256, 4, 2), (512, 2, 1))
LAYERS, COUNT = 4, 2
# Category of messages -> (flags, data-parallel size on two ranks).
SPLIT = {
    "tensor parallel": ("--tensor-model-parallel-size 2 --sequence-parallel", 1),
    f"tensor parallel{REDUCED}": ("--tensor-model-parallel-size 2", 1),
    "context parallel": ("--context-parallel-size 2 --context-parallel-algo ulysses_cp_algo", 1),
    "expert parallel": (f"{EXPERTS} --expert-model-parallel-size 2", 2),
}
# Of each training: twelve steps.
TURNS = 6
# Parts of a step that messages of gradients and parameters take.
SENT = ("gradients", "parameters")


def measure(ranks: int, seconds: float, script: str) -> dict[str, Any]:
    """What `run.measure` measures, with the overheads of trainings of a script, and the seconds of their steps.

    The trainings come first: a script that does not run says so in seconds.

    Raises:
        CalibrationError: a training did not run, or a process of the measurement failed.
    """
    began = time.monotonic()
    trained = run_trainings(script, ranks == 2 and len(os.sched_getaffinity(0)) > 1)
    taken = round(time.monotonic() - began, 1)
    measured = run.measure(ranks, seconds)
    steps = [{"words": each.words, "ranks": each.ranks, "seconds": step} for each, step in trained.items()]
    return {**measured, "overheads": {**overheads(measured, trained), "seconds": taken}, "trainings": steps}


def run_trainings(script: str, has_two: bool, turns: int = TURNS) -> dict[Training, float]:
    """Seconds of an undisturbed step of each short training. has_two: those of two ranks too.

    Raises:
        CalibrationError: a training did not run.
    """
    given = [*_tiny(), *itertools.chain(*whole(has_two).values()), *_split(has_two).values()]
    with tempfile.TemporaryDirectory(prefix="mindspeed-lite-probe-") as name:
        measured = measured_steps(script, given, Path(name) / "trainings", turns)
    found = {}
    for training, each in zip(given, measured, strict=True):
        if isinstance(each, str):
            raise CalibrationError(f"{script}: {each}")
        found[training] = undisturbed(each)
    return found


def overheads(measured: Mapping[str, Any], seconds: Mapping[Training, float]) -> dict[str, Any]:
    """Seconds of a layer, a micro-batch and a step beside what operators take; what is measured as less is 0.

    `slack`: by processes at work, seconds of operators in a training over those alone. `split`: seconds of a layer that
    two ranks split, by the category of their messages.

    Args:
        measured: operators and messages, as `run.measure` gives them.
        seconds: as `run_trainings` gives them.
    """
    has_two = any(each.ranks > 1 for each in seconds)
    with tempfile.TemporaryDirectory(prefix="mindspeed-lite-probe-") as name:
        file = Path(name) / "calibration.json"

        def predicted(training: Training, found: Mapping[str, Any]) -> StepTime:
            file.write_text(json.dumps({**measured, "overheads": found}))
            pricer = Pricer(calibrated.read(file, training.ranks), measured["overlap"])
            return step_time.step(arguments.read(training.words, training.ranks, "cpu"), pricer)

        found: dict[str, Any] = _overheads([seconds[each] - predicted(each, {}).seconds for each in _tiny()])
        slack = {}
        for ranks, several in whole(has_two).items():
            taken = alone = 0.0
            for each in several:
                bare = predicted(each, {})
                sent = sum(bare.parts.get(part, 0.0) for part in SENT)
                taken += seconds[each] - sent - (predicted(each, found).seconds - bare.seconds)
                alone += bare.seconds - sent
            slack[str(ranks)] = max(0.5, taken / alone)
        found["slack"] = slack
        found["split"] = {
            category: max(0.0, seconds[each] - predicted(each, found).seconds) / LAYERS / COUNT
            for category, each in _split(has_two).items()
        }
    return found


def _tiny() -> list[Training]:
    return [Training(_words(64, layers, count)) for layers, count in TINY]


def whole(has_two: bool) -> dict[int, list[Training]]:
    """Of one process, and of two with a replica each, by processes: those whose steps operators take nearly alone."""
    return {
        ranks: [Training(_words(width, layers, count * ranks), ranks) for width, layers, count in WHOLE]
        for ranks in ((1, 2) if has_two else (1,))
    }


def _split(has_two: bool) -> dict[str, Training]:
    given = SPLIT.items() if has_two else ()
    return {name: Training(_words(256, LAYERS, COUNT * data, flags), 2) for name, (flags, data) in given}


def _words(hidden: int, layers: int, batch: int, flags: str = "") -> tuple[str, ...]:
    """Arguments of a model as long as it is wide."""
    sizes = (
        f"--hidden-size {hidden} --ffn-hidden-size {3 * hidden} --seq-length {hidden} "
        f"--max-position-embeddings {hidden} --num-layers {layers} --global-batch-size {batch}"
    )
    return (*WORDS.split(), *sizes.split(), *flags.split())


def _overheads(left: Sequence[float]) -> dict[str, Any]:
    """Of a layer, a micro-batch and a step, from what is left of the tiny trainings."""
    (few, one), (many, _), (_, more) = TINY
    layer = max(0.0, (left[1] - left[0]) / (many - few) / one)
    microbatch = max(0.0, (left[2] - left[0]) / (more - one) - few * layer)
    return {"layer": layer, "microbatch": microbatch, "step": max(0.0, left[0] - few * layer - microbatch)}
