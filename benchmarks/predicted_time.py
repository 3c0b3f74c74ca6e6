"""Predicted and measured step time of twenty small trainings on this CPU.

    python -m benchmarks.predicted_time [--only NAME ...] [--calibration FILE] [--page FILE]

Calibrates this machine, then runs trainings of one to four processes: about ten minutes on two cores. Nothing else may
run meanwhile. Trainings with more processes than cores are judged separately.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mindspeed_lite.bench import harness
from mindspeed_lite.bench.calibration import CalibrationError, measure
from mindspeed_lite.bench.plan import Arm
from mindspeed_lite.planner import arguments, calibrated, step_time
from mindspeed_lite.planner.step_time import Pricer

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = "examples/pretrain_gpt.py"
PLAIN = (
    "--bf16 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --normalization RMSNorm --swiglu "
    "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0 "
    "--attention-dropout 0 --train-iters 1000 --log-interval 1 --eval-iters 1 --eval-interval 1000 --split 90,5,5 "
    "--seed 1234"
)
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


_MEDIUM = _model(4, 256, 256, 1, 8)


@dataclass(frozen=True)
class Case:
    """A training. `group`: layouts of the same work on as many processes, of which one is the fastest."""

    name: str
    processes: int
    flags: str
    group: str = ""

    @property
    def arguments(self) -> list[str]:
        return [*PLAIN.split(), *self.flags.split()]


CASES = (
    Case("small", 1, f"{_model(2, 128, 128, 2, 4)} {FUSED}"),
    Case("wide", 1, f"{_model(2, 512, 256, 1, 2)} {FUSED}"),
    Case("deep", 1, f"{_model(8, 256, 256, 1, 2)} {FUSED}"),
    Case("long", 1, f"{_model(2, 256, 1024, 1, 2)} {FUSED}"),
    Case("plain", 1, _model(4, 256, 256, 1, 2)),
    Case("micro-batches of 1", 1, f"{_MEDIUM} {FUSED}", "one process"),
    Case("micro-batches of 4", 1, f"{_model(4, 256, 256, 4, 8)} {FUSED}", "one process"),
    Case("recomputed", 1, f"{_MEDIUM} {FUSED} {FULL}", "one process"),
    Case("experts", 1, f"{_MEDIUM} {FUSED} {EXPERTS}"),
    Case("dp2", 2, f"{_MEDIUM} {FUSED}", "two processes"),
    Case("dp2 distributed", 2, f"{_MEDIUM} {FUSED} --use-distributed-optimizer", "two processes"),
    Case("tp2", 2, f"{_MEDIUM} {FUSED} {TP2}", "two processes"),
    Case("tp2 sp", 2, f"{_MEDIUM} {FUSED} {TP2} --sequence-parallel", "two processes"),
    Case("pp2", 2, f"{_MEDIUM} {FUSED} {PP2}", "two processes"),
    Case("pp2 vpp2", 2, f"{_MEDIUM} {FUSED} {PP2} --num-virtual-stages-per-pipeline-rank 2", "two processes"),
    Case("cp2", 2, f"{_MEDIUM} {FUSED} {CP2} --context-parallel-algo ulysses_cp_algo", "two processes"),
    Case("ep2", 2, f"{_MEDIUM} {FUSED} {EXPERTS} {EP2}"),
    Case("tp2 dp2", 4, f"{_MEDIUM} {FUSED} {TP2} --sequence-parallel", "four processes"),
    Case("pp2 dp2", 4, f"{_MEDIUM} {FUSED} {PP2}", "four processes"),
    Case("dp4", 4, f"{_MEDIUM} {FUSED}", "four processes"),
)


@dataclass(frozen=True)
class Pair:
    """Predicted and measured seconds of a step."""

    name: str
    group: str
    processes: int
    predicted: float
    measured: float
    parts: dict[str, float]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def predict(case: Case, calibration: Path, cores: int) -> step_time.StepTime:
    """The predicted step of a case."""
    device = calibrated.read(calibration, min(case.processes, cores))
    return step_time.step(arguments.read(case.arguments, case.processes, "cpu"), Pricer(device, device.overlap))


def measured_seconds(case: Case, folder: Path, steps: int) -> float:
    """The median step of a real training.

    Raises:
        RuntimeError: it did not run.
    """
    start = [sys.executable]
    if case.processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.processes)]
    job = harness.Job((*start, SCRIPT, *case.arguments), folder, 2, steps, 300.0, "keep", {"OMP_NUM_THREADS": "1"})
    outcome = harness.run(job, Arm("as given", "given"), 1)
    if outcome.status != "ok":
        raise RuntimeError(f"{case.name}: {outcome.reason}: {' | '.join(outcome.log_tail[-3:])}")
    return float(statistics.median(step["seconds"] for step in outcome.steps if step["measured"]))


def verdict(pairs: Sequence[Pair], cores: int) -> list[str]:
    """The mean errors, and where the layout predicted to be fastest of each group is among the measured ones."""
    lines = []
    for about, members in (
        ("where every rank has a core", [each for each in pairs if each.processes <= cores]),
        ("where ranks share cores", [each for each in pairs if each.processes > cores]),
    ):
        if members:
            mean = statistics.mean(abs(each.error) for each in members)
            worst = max(members, key=lambda each: abs(each.error))
            lines.append(
                f"Mean error {about}: {mean:.1%} over {len(members)} trainings; the largest is {worst.error:+.1%} "
                f"({worst.name})."
            )
    for group in dict.fromkeys(each.group for each in pairs if each.group):
        members = [each for each in pairs if each.group == group]
        best = min(members, key=lambda each: each.predicted)
        if len(members) > 1:
            place = 1 + sum(each.measured < best.measured for each in members)
            lines.append(
                f"Of {len(members)} layouts on {group}, the one predicted fastest is number {place} as measured."
            )
    return lines


def page_of(pairs: Sequence[Pair], calibration: dict[str, Any]) -> str:
    """The page in Markdown."""
    cores = calibration["cores"]
    lines = [
        "# Time predicted and measured",
        "",
        "`python -m benchmarks.predicted_time --page docs/benchmarks/predicted-time.md` on "
        f"{calibration['device']}, torch {calibration['versions']['torch']},",
        f"calibrated {calibration['date']} in {calibration['seconds']:.0f} s.",
        "*Measured*: the median step of a training over gloo, one thread a rank.",
        "*Predicted*: by [`mindspeed-lite plan`](../plan.md).",
        "",
        *(f"- {each}" for each in verdict(pairs, cores)),
        "",
        "| training | processes | predicted | measured | error | largest parts of the prediction |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for each in pairs:
        largest = step_time.by_category(each.parts)[:3]
        parts = ", ".join(f"{name} {value / each.predicted:.0%}" for name, value in largest)
        shared = " (share cores)" if each.processes > cores else ""
        lines.append(
            f"| {each.name}{shared} | {each.processes} | {each.predicted * 1e3:.0f} ms | {each.measured * 1e3:.0f} ms "
            f"| {each.error:+.1%} | {parts} |"
        )
    return "\n".join(lines) + "\n"


def main(given: Sequence[str] | None = None) -> int:
    """Calibrate, run, compare, and write the page if one is named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predicted_time", description="Time, predicted.")
    names = [each.name for each in CASES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--calibration", metavar="FILE", help="of `mindspeed-lite calibrate` (default: calibrate now)")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="measured of each training (%(default)s)")
    parser.add_argument("--page", metavar="FILE", help="the page to write, with its figures as JSON next to it")
    options = parser.parse_args(given)
    os.chdir(ROOT)
    cores = len(os.sched_getaffinity(0))
    pairs = []
    with tempfile.TemporaryDirectory(prefix="predicted-time-") as name:
        file = Path(options.calibration or Path(name, "calibration.json"))
        if not options.calibration:
            file.write_text(json.dumps(measure(min(2, cores), 30.0)))
        for case in CASES:
            if options.only and case.name not in options.only:
                continue
            predicted = predict(case, file, cores)
            measured = measured_seconds(case, Path(name, case.name.replace(" ", "-")), options.steps)
            pairs.append(
                Pair(case.name, case.group, case.processes, predicted.seconds, measured, dict(predicted.parts))
            )
            print(
                f"{case.name}: predicted {predicted.seconds:.3f} s, measured {measured:.3f} s, {pairs[-1].error:+.1%}",
                flush=True,
            )
        calibration = json.loads(file.read_text())
    print("\n".join(verdict(pairs, cores)))
    if options.page:
        page = Path(options.page)
        page.write_text(page_of(pairs, calibration))
        figures = {"calibration": calibration, "pairs": [asdict(each) for each in pairs]}
        page.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (CalibrationError, RuntimeError) as error:
        sys.exit(f"predicted_time: {error}")
