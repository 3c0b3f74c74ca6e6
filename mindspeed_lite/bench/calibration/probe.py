"""Measures what a training takes beside its operators and messages: short trainings, and what is left of their steps.

Tiny ones of one process differ in layers and micro-batches: what a layer, a micro-batch and a step take where operators
take next to nothing. Larger ones, of one process and of two with a replica each, say how much longer operators take in
a training than alone. Those of two ranks that split tensors, sequence or experts say what a layer takes beside its
messages: waiting for the slower rank, reordering, and operators that one rank has no use for.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_lite.bench.calibration.run import CalibrationError
from mindspeed_lite.bench.calibration.samples import undisturbed
from mindspeed_lite.bench.calibration.trainings import Training, measured_steps
from mindspeed_lite.planner import arguments, calibrated, step_time
from mindspeed_lite.planner.step_time import Pricer, StepTime

WORDS = (
    "--num-attention-heads 4 --micro-batch-size 1 --vocab-size 2047 --bf16 --lr 1e-4 --mock-data "
    "--tokenizer-type NullTokenizer --normalization RMSNorm --swiglu --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 "
    "--train-iters 1000 --log-interval 1 --eval-iters 1 --eval-interval 1000 --split 90,5,5 --seed 1234 "
    "--use-flash-attn --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb --use-fused-cross-entropy "
    "--use-fused-adamw"
)
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type none --moe-router-force-load-balancing --moe-grouped-gemm --moe-permute-fusion"
)
# (layers, micro-batches)
TINY = ((2, 1), (10, 1), (2, 6))
# (width, layers)
WHOLE = ((256, 4), (512, 2))
LAYERS, COUNT = 4, 2
# Category of messages -> (flags, data-parallel size on two ranks).
SPLIT = {
    "tensor parallel": ("--tensor-model-parallel-size 2 --sequence-parallel", 1),
    "context parallel": ("--context-parallel-size 2 --context-parallel-algo ulysses_cp_algo", 1),
    "expert parallel": (f"{EXPERTS} --expert-model-parallel-size 2", 2),
}
# Parts of a step that messages of gradients and parameters take.
SENT = ("gradients", "parameters")


def overheads(measured: Mapping[str, Any], script: str, steps: int = 12) -> dict[str, Any]:
    """Seconds of a layer, a micro-batch and a step beside what operators take; what is measured as less is 0.

    `slack`: by processes at work, seconds of operators in a training over those alone. `split`: seconds of a layer that
    two ranks split, by the category of their messages. `seconds`: for how long all this was measured.

    Raises:
        CalibrationError: a training did not run.
    """
    began = time.monotonic()
    has_two = measured["cores"] > 1 and "2" in measured["operators"]
    tiny = [Training(_words(64, layers, count)) for layers, count in TINY]
    whole = {
        ranks: [Training(_words(width, layers, COUNT * ranks), ranks) for width, layers in WHOLE]
        for ranks in ((1, 2) if has_two else (1,))
    }
    split = [Training(_words(256, LAYERS, COUNT * data, flags), 2) for flags, data in SPLIT.values()] if has_two else []
    with tempfile.TemporaryDirectory(prefix="mindspeed-lite-probe-") as name:
        seconds = _seconds(script, [*tiny, *itertools.chain(*whole.values()), *split], Path(name) / "trainings", steps)
        file = Path(name) / "calibration.json"

        def predicted(training: Training, found: Mapping[str, Any]) -> StepTime:
            file.write_text(json.dumps({**measured, "overheads": found}))
            pricer = Pricer(calibrated.read(file, training.ranks), measured["overlap"])
            return step_time.step(arguments.read(training.words, training.ranks, "cpu"), pricer)

        found: dict[str, Any] = _overheads([seconds[each] - predicted(each, {}).seconds for each in tiny])
        slack = {}
        for ranks, several in whole.items():
            taken = alone = 0.0
            for each in several:
                bare = predicted(each, {})
                sent = sum(bare.parts.get(part, 0.0) for part in SENT)
                taken += seconds[each] - sent - (predicted(each, found).seconds - bare.seconds)
                alone += bare.seconds - sent
            slack[str(ranks)] = max(0.5, taken / alone)
        found["slack"] = slack
        left = {
            category: max(0.0, seconds[each] - predicted(each, found).seconds) / LAYERS / COUNT
            for category, each in zip(SPLIT, split, strict=False)
        }
    return {**found, "split": left, "seconds": round(time.monotonic() - began, 1)}


def _words(hidden: int, layers: int, batch: int, flags: str = "") -> tuple[str, ...]:
    """Arguments of a model as long as it is wide."""
    sizes = (
        f"--hidden-size {hidden} --ffn-hidden-size {3 * hidden} --seq-length {hidden} "
        f"--max-position-embeddings {hidden} --num-layers {layers} --global-batch-size {batch}"
    )
    return (*WORDS.split(), *sizes.split(), *flags.split())


def _seconds(script: str, trainings: Sequence[Training], folder: Path, steps: int) -> dict[Training, float]:
    """An undisturbed step of each."""
    found = {}
    for training, each in zip(trainings, measured_steps(script, trainings, folder, steps), strict=True):
        if isinstance(each, str):
            raise CalibrationError(f"{script}: {each}")
        found[training] = undisturbed(each)
    return found


def _overheads(left: Sequence[float]) -> dict[str, Any]:
    """Of a layer, a micro-batch and a step, from what is left of the tiny trainings."""
    (few, one), (many, _), (_, more) = TINY
    layer = max(0.0, (left[1] - left[0]) / (many - few) / one)
    microbatch = max(0.0, (left[2] - left[0]) / (more - one) - few * layer)
    return {"layer": layer, "microbatch": microbatch, "step": max(0.0, left[0] - few * layer - microbatch)}
