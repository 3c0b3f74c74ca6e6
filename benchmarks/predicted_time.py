"""Predicted and measured step time of twenty small trainings on this CPU: about ten minutes on two cores.

Calibrates this machine, then runs trainings of one to four processes, one thread a rank; nothing else may run
meanwhile. Trainings with more processes than cores are judged separately.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.configurations import COMMON
from benchmarks.harness import ROOT, Benchmark, Options, Row, launcher, train
from mindspeed_lite.bench import calibration
from mindspeed_lite.bench.wording import seconds
from mindspeed_lite.planner import arguments, calibrated, step_time
from mindspeed_lite.planner.step_time import Pricer

FUSED = (
    "--use-flash-attn --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb --use-fused-cross-entropy "
    "--use-fused-adamw"
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
TP2, PP2, CP2, EP2 = (
    f"--{name}-parallel-size 2" for name in ("tensor-model", "pipeline-model", "context", "expert-model")
)
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 384 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type none --moe-router-force-load-balancing --moe-grouped-gemm --moe-permute-fusion"
)


def _model(layers: int, hidden: int, sequence: int, micro: int, batch: int) -> str:
    return (
        f"--num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {3 * hidden} --num-attention-heads 4 "
        f"--seq-length {sequence} --max-position-embeddings {sequence} --vocab-size 2047 --micro-batch-size {micro} "
        f"--global-batch-size {batch}"
    )


_MEDIUM = f"{_model(4, 256, 256, 1, 8)} {FUSED}"
ONE, TWO, FOUR = "one process", "two processes", "four processes"


class Training(NamedTuple):
    """`group`: layouts of the same work on as many processes, of which one is the fastest."""

    processes: int
    flags: str
    group: str = ""

    @property
    def arguments(self) -> list[str]:
        return [*COMMON.split(), *self.flags.split()]


TRAININGS = {
    "small": Training(1, f"{_model(2, 128, 128, 2, 4)} {FUSED}"),
    "wide": Training(1, f"{_model(2, 512, 256, 1, 2)} {FUSED}"),
    "deep": Training(1, f"{_model(8, 256, 256, 1, 2)} {FUSED}"),
    "long": Training(1, f"{_model(2, 256, 1024, 1, 2)} {FUSED}"),
    "plain": Training(1, _model(4, 256, 256, 1, 2)),
    "micro-batches of 1": Training(1, _MEDIUM, ONE),
    "micro-batches of 4": Training(1, f"{_model(4, 256, 256, 4, 8)} {FUSED}", ONE),
    "recomputed": Training(1, f"{_MEDIUM} {FULL}", ONE),
    "experts": Training(1, f"{_MEDIUM} {EXPERTS}"),
    "dp2": Training(2, _MEDIUM, TWO),
    "dp2 distributed": Training(2, f"{_MEDIUM} --use-distributed-optimizer", TWO),
    "tp2": Training(2, f"{_MEDIUM} {TP2}", TWO),
    "tp2 sp": Training(2, f"{_MEDIUM} {TP2} --sequence-parallel", TWO),
    "pp2": Training(2, f"{_MEDIUM} {PP2}", TWO),
    "pp2 vpp2": Training(2, f"{_MEDIUM} {PP2} --num-virtual-stages-per-pipeline-rank 2", TWO),
    "cp2": Training(2, f"{_MEDIUM} {CP2} --context-parallel-algo ulysses_cp_algo", TWO),
    "ep2": Training(2, f"{_MEDIUM} {EXPERTS} {EP2}"),
    "tp2 dp2": Training(4, f"{_MEDIUM} {TP2} --sequence-parallel", FOUR),
    "pp2 dp2": Training(4, f"{_MEDIUM} {PP2}", FOUR),
    "dp4": Training(4, _MEDIUM, FOUR),
}


def predict(training: Training, file: Path, cores: int) -> step_time.StepTime:
    """The predicted step."""
    device = calibrated.read(file, min(training.processes, cores))
    return step_time.step(arguments.read(training.arguments, training.processes, "cpu"), Pricer(device, device.overlap))


def summary(rows: Sequence[Row], cores: int) -> list[str]:
    """The mean errors, and where the layout predicted to be fastest of each group is among the measured ones."""
    lines = []
    for about, members in (
        ("where every rank has a core", [each for each in rows if each["processes"] <= cores]),
        ("where ranks share cores", [each for each in rows if each["processes"] > cores]),
    ):
        if members:
            mean = statistics.mean(abs(_error(each)) for each in members)
            worst = max(members, key=lambda each: abs(_error(each)))
            lines.append(
                f"Mean error {about}: {mean:.1%} over {len(members)} trainings; the largest is {_error(worst):+.1%} "
                f"({worst['name']})."
            )
    for group in dict.fromkeys(each["group"] for each in rows if each["group"]):
        members = [each for each in rows if each["group"] == group]
        best = min(members, key=lambda each: float(each["predicted"]))
        if len(members) > 1:
            place = 1 + sum(each["measured"] < best["measured"] for each in members)
            lines.append(
                f"Of {len(members)} layouts on {group}, the one predicted fastest is number {place} as measured."
            )
    return lines


def _error(row: Row) -> float:
    return float(row["predicted"] / row["measured"] - 1)


def _parts(row: Row) -> str:
    largest = step_time.by_category(row["parts"])[:3]
    return ", ".join(f"{name} {value / row['predicted']:.0%}" for name, value in largest)


def _measure(options: Options) -> list[Row]:
    os.chdir(ROOT)
    cores, rows = len(os.sched_getaffinity(0)), []
    with tempfile.TemporaryDirectory(prefix="predicted-time-") as folder:
        file = Path(options.calibration or Path(folder, "calibration.json"))
        if not options.calibration:
            file.write_text(json.dumps(calibration.measure(min(2, cores), options.seconds)))
        for name in options.only:
            training = TRAININGS[name]
            predicted = predict(training, file, cores)
            command = [*launcher(training.processes), "examples/pretrain_gpt.py", *training.arguments]
            outcome = train(command, Path(folder), options.steps, threads=1)
            rows.append({
                "name": name, "group": training.group, "processes": training.processes, "parts": dict(predicted.parts),
                "predicted": predicted.seconds, "measured": statistics.median(outcome.measured_seconds),
            })  # fmt: skip
    print("\n".join(summary(rows, cores)))
    return rows


def _figures(page: Path, options: Options, rows: list[Row]) -> None:
    """The summary below the table, and the rows as JSON."""
    with page.open("a") as file:
        file.write("\n" + "\n".join(f"- {each}" for each in summary(rows, len(os.sched_getaffinity(0)))) + "\n")
    page.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")


BENCHMARK = Benchmark(
    name="predicted_time",
    title="Time predicted and measured",
    about="*Measured*: the median of {steps} steps of a training over gloo, one thread a rank. *Predicted*: by "
    "[`mindspeed-lite plan`](../plan.md) with a calibration of this machine.",
    columns={
        "training": lambda row: row["name"],
        "processes": lambda row: str(row["processes"]),
        "predicted": lambda row: seconds(row["predicted"]),
        "measured": lambda row: seconds(row["measured"]),
        "error": lambda row: f"{_error(row):+.1%}",
        "largest parts of the prediction": _parts,
    },
    measure=_measure,
    options={"only": [*TRAININGS], "calibration": "", "seconds": 30.0, "steps": 8},
    tiny={"only": ["small", "dp2"], "seconds": 5.0, "steps": 2},
    choices={"only": [*TRAININGS]},
    finish=_figures,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
