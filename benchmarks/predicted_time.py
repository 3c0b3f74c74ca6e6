"""Time predicted beside measured: `python -m benchmarks.predicted_time --page docs/benchmarks/predicted-time.md`.

    python -m benchmarks.predicted_time [--only NAME ...] [--calibration FILE] [--rounds 2] [--page FILE]

A round calibrates this machine, then runs twenty trainings of one to four processes: about seven minutes on two cores.
Nothing else may run meanwhile. What is predicted is by one calibration, the first round's; what each of the others
would have predicted is said beside it. What is measured is the lower quartile of the steps of all rounds, as the
calibration takes it of its own. Some of the calibration's own short trainings run again among the twenty: how their
steps have changed is the machine's doing and noise, and no prediction's. Four processes on two cores share
them, and are judged apart.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mindspeed_lite.bench.calibration import probe, run, trainings
from mindspeed_lite.bench.calibration.samples import undisturbed
from mindspeed_lite.bench.calibration.trainings import Training
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
    """A training. `group`: those that do the same work on as many processes, of which one is the best layout."""

    name: str
    processes: int
    flags: str
    group: str = ""

    @property
    def training(self) -> Training:
        return Training((*PLAIN.split(), *self.flags.split()), self.processes)


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
    """A step of a case in seconds, predicted and measured.

    `median`: of the same steps; the others are undisturbed. `others`: predicted by each further calibration.
    `drifts`: by calibration, what the same short trainings took among the measured ones over what they took then.
    """

    name: str
    group: str
    processes: int
    predicted: float
    measured: float
    parts: dict[str, float]
    median: float = math.nan
    others: tuple[float, ...] = ()
    drifts: tuple[float, ...] = ()

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def predict(case: Case, calibration: Path, cores: int) -> step_time.StepTime:
    """The step of a case by what was calibrated."""
    device = calibrated.read(calibration, min(case.processes, cores))
    return step_time.step(arguments.read(case.training.words, case.processes, "cpu"), Pricer(device, device.overlap))


def measure(cases: Mapping[str, Training], folder: Path, turns: int) -> dict[str, list[float] | str]:
    """Seconds of each step of real trainings by their names, or why there are none."""
    found = trainings.measured_steps(SCRIPT, [*cases.values()], folder, turns)
    return dict(zip(cases, found, strict=True))


def steps_then(calibration: Mapping[str, Any]) -> dict[Training, float]:
    """Seconds of a step of each short training of a calibration; one without a script has none."""
    return {Training(tuple(each["words"]), each["ranks"]): each["seconds"] for each in calibration.get("trainings", ())}


def with_those_again(
    cases: Sequence[Case], known: Collection[Training]
) -> tuple[dict[str, Training], dict[int, list[str]]]:
    """All trainings by their names, and the names of those of a calibration, by processes.

    known: the trainings of the calibration. One of them runs before the cases of as many processes, the others behind.
    """
    runs: dict[str, Training] = {}
    names: dict[int, list[str]] = {}
    several = probe.whole(True)
    for processes in dict.fromkeys(each.processes for each in cases):
        again = [each for each in several.get(processes, ()) if each in known]
        named = [(f"calibrated {processes}.{number}", each) for number, each in enumerate(again)]
        if named:
            names[processes] = [name for name, _ in named]
        mine = [(each.name, each.training) for each in cases if each.processes == processes]
        runs |= dict([*named[:1], *mine, *named[1:]])
    return runs, names


def drift(again: Mapping[str, Training], calibration: Mapping[str, Any], steps: Mapping[str, Sequence[float]]) -> float:
    """What steps of a calibration's trainings take now over what they took then."""
    then = steps_then(calibration)
    return statistics.mean(undisturbed(steps[name]) / then[each] for name, each in again.items())


def rank_correlation(pairs: Sequence[Pair]) -> float:
    """Spearman's, of predicted and measured seconds."""
    by_predicted = sorted(range(len(pairs)), key=lambda each: pairs[each].predicted)
    by_measured = sorted(range(len(pairs)), key=lambda each: pairs[each].measured)
    place = {each: number for number, each in enumerate(by_measured)}
    apart = sum((number - place[each]) ** 2 for number, each in enumerate(by_predicted))
    count = len(pairs)
    return 1 - 6 * apart / (count * (count**2 - 1)) if count > 1 else math.nan


def best_places(pairs: Sequence[Pair]) -> dict[str, int]:
    """Group -> the place among the measured of the case that is predicted to be its fastest, from 1."""
    found = {}
    for group in dict.fromkeys(each.group for each in pairs if each.group):
        members = [each for each in pairs if each.group == group]
        best = min(members, key=lambda each: each.predicted)
        found[group] = 1 + sum(each.measured < best.measured for each in members)
    return found


def verdict(pairs: Sequence[Pair], cores: int) -> list[str]:
    """What the figures say, a line each: of trainings whose ranks have a core each, and of the others apart."""
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
            if all(each.median > 0 for each in members):
                mean = statistics.mean(abs(each.predicted / each.median - 1) for each in members)
                lines.append(f"Against the medians of the same steps, disturbances counted: {mean:.1%}.")
            if all(each.others for each in members):
                errors = by_calibration(members)[1:]
                lines.append(f"By each of the further calibrations alone: {_percent(errors)}.")
            drifts = {each.processes: each.drifts for each in members if each.drifts}
            if drifts:
                several = ", ".join(
                    f"{' and '.join(f'{each:.2f}' for each in found)} ({count} rank{'s' * (count > 1)})"
                    for count, found in drifts.items()
                )
                counted = _percent(by_calibration(members, True))
                lines.append(
                    f"Short trainings of the calibrations, run again among these, took {several} of what they took "
                    f"then: what the machine does. Mean error with that counted, by each calibration: {counted}."
                )
        if len(members) > 1:
            lines.append(f"Rank correlation {about}: {rank_correlation(members):.3f}.")
    if len(pairs) > 1:
        lines.append(f"Rank correlation of all {len(pairs)}: {rank_correlation(pairs):.3f}.")
    for group, place in best_places(pairs).items():
        count = sum(each.group == group for each in pairs)
        if count > 1:
            among = "among" if place <= 2 else "NOT among"
            lines.append(
                f"Of {count} layouts on {group}, the one predicted fastest is measured as number {place}: {among} the "
                "fastest two."
            )
    return lines


def by_calibration(pairs: Sequence[Pair], drifted: bool = False) -> list[float]:
    """The mean error by each calibration alone. drifted: with what the machine does now and did not do then."""
    factors = [each.drifts if drifted and each.drifts else [1.0] * (1 + len(each.others)) for each in pairs]
    errors = (
        [
            abs(seconds * factor / each.measured - 1)
            for seconds, factor in zip((each.predicted, *each.others), row, strict=True)
        ]
        for each, row in zip(pairs, factors, strict=True)
    )
    return [statistics.mean(column) for column in zip(*errors, strict=True)]


def _percent(shares: Sequence[float]) -> str:
    return ", ".join(f"{each:.1%}" for each in shares)


def page_of(pairs: Sequence[Pair], calibration: dict[str, Any], picture: str, failed: Sequence[str] = ()) -> str:
    """The page in Markdown. failed: of trainings that did not run, a line each."""
    cores, beside = calibration["cores"], calibration.get("overheads", {})
    lines = [
        "# Time predicted and measured",
        "",
        "`python -m benchmarks.predicted_time --page docs/benchmarks/predicted-time.md` on "
        f"{calibration['device']}, {cores} cores,",
        f"torch {calibration['versions']['torch']}, calibrated {calibration['date']} "
        f"in {calibration['seconds']:.0f} s, and {beside.get('seconds', 0.0):.0f} s of short trainings.",
        "*Measured*: the lower quartile of the steps of all rounds of a training over gloo, a rank having one thread.",
        "*Predicted*: by [`mindspeed-lite plan`](../plan.md) with the first calibration.",
        "",
        *(f"- {each}" for each in verdict(pairs, cores)),
        "",
        f"![predicted over measured seconds]({picture})",
        "",
        "| training | processes | predicted | measured | error | largest parts of the prediction |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for each in pairs:
        parts = ", ".join(
            f"{name} {value / each.predicted:.0%}" for name, value in step_time.by_category(each.parts)[:3]
        )
        shared = " (share cores)" if each.processes > cores else ""
        lines.append(
            f"| {each.name}{shared} | {each.processes} | {each.predicted * 1e3:.0f} ms "
            f"| {each.measured * 1e3:.0f} ms | "
            f"{each.error:+.1%} | {parts} |"
        )
    if any(each.processes > cores for each in pairs):
        lines += [
            "",
            f"Trainings of more processes than the {cores} cores share them: the prediction does not count waits for a",
            "sender that has no core at that moment.",
        ]
    if failed:
        lines += ["", *(f"- {each}" for each in failed)]
    return "\n".join(lines) + "\n"


def draw(pairs: Sequence[Pair], cores: int, path: Path) -> None:
    """Predicted over measured, on logarithmic axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 6.0), layout="constrained")
    axes = figure.subplots()
    for label, members in (
        ("a core for each rank", [each for each in pairs if each.processes <= cores]),
        ("ranks share cores", [each for each in pairs if each.processes > cores]),
    ):
        axes.loglog([each.measured for each in members], [each.predicted for each in members], "o", label=label)
    ends = [min(each.measured for each in pairs) / 1.2, max(each.measured for each in pairs) * 1.2]
    axes.plot(ends, ends, "-", color="gray", linewidth=1)
    axes.set_xlabel("measured seconds of a step")
    axes.set_ylabel("predicted seconds of a step")
    axes.legend()
    figure.savefig(path)


def _calibrated(folder: Path, cores: int, seconds: float) -> Path:
    """The file of a calibration that has been made now."""
    found = probe.measure(min(2, cores), seconds, SCRIPT)
    file = folder / "calibration.json"
    file.write_text(json.dumps(found))
    return file


def _pair(
    case: Case, predicted: Sequence[step_time.StepTime], steps: Sequence[float], drifts: Sequence[float] = ()
) -> Pair:
    """By the first calibration, and what the others would have said."""
    first, *others = predicted
    return Pair(
        case.name, case.group, case.processes, first.seconds, undisturbed(steps), dict(first.parts),
        statistics.median(steps), tuple(each.seconds for each in others), tuple(drifts),
    )  # fmt: skip


def main(given: Sequence[str] | None = None) -> int:
    """Calibrate, run, compare, and write the page if one is named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predicted_time", description="Time, predicted.")
    names = [each.name for each in CASES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--calibration", metavar="FILE", help="one that is there (default: calibrate first)")
    parser.add_argument("--seconds", type=float, default=15.0, metavar="S", help="of the calibration (%(default)g)")
    parser.add_argument("--turns", type=int, default=4, metavar="N", help="of each, two steps (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="of everything (%(default)s)")
    parser.add_argument("--page", metavar="FILE", help="the page to write, with a picture and the figures beside it")
    options = parser.parse_args(given)
    if min(options.turns, options.rounds) < 1:
        parser.error("--turns and --rounds are at least 1")
    os.chdir(ROOT)
    cores, began = len(os.sched_getaffinity(0)), time.monotonic()
    cases = [each for each in CASES if not options.only or each.name in options.only]
    runs: dict[str, Training] = {}
    again: dict[int, list[str]] = {}
    predicted: dict[str, list[step_time.StepTime]] = {each.name: [] for each in cases}
    steps: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    calibrations: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="predicted-time-") as name:
        for number in range(options.rounds):
            folder = Path(name) / str(number)
            folder.mkdir()
            file = Path(options.calibration) if options.calibration else _calibrated(folder, cores, options.seconds)
            if not (number and options.calibration):
                calibrations.append(json.loads(file.read_text()))
                for case in cases:
                    predicted[case.name].append(predict(case, file, cores))
            runs, again = with_those_again(cases, steps_then(calibrations[0]))
            for run_name, taken in measure(runs, folder / "trainings", options.turns).items():
                if isinstance(taken, str):
                    failed[run_name] = taken
                else:
                    steps.setdefault(run_name, []).extend(taken)
            print(f"round {number + 1}: {time.monotonic() - began:.0f} s", flush=True)
    calibration = calibrations[0]
    drifts = {
        processes: [drift({each: runs[each] for each in names}, told, steps) for told in calibrations]
        for processes, names in again.items()
        if not failed.keys() & set(names)
    }
    pairs = [
        _pair(case, predicted[case.name], steps[case.name], drifts.get(case.processes, ()))
        for case in cases
        if case.name not in failed
    ]
    for each in pairs:
        print(f"{each.name}: predicted {each.predicted:.3f} s, measured {each.measured:.3f} s, {each.error:+.1%}")
    problems = [f"{name}: no figures: {why}" for name, why in failed.items()]
    for line in problems:
        print(line)
    for line in verdict(pairs, cores):
        print(line)
    print(f"{time.monotonic() - began:.0f} s in all")
    if options.page and pairs:
        page = Path(options.page)
        page.parent.mkdir(parents=True, exist_ok=True)
        picture = page.with_suffix(".png")
        draw(pairs, cores, picture)
        page.with_suffix(".json").write_text(
            json.dumps({"calibration": calibration, "pairs": [asdict(each) for each in pairs]}, indent=1) + "\n"
        )
        page.write_text(page_of(pairs, calibration, picture.name, problems))
    return 1 if failed or not pairs else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except run.CalibrationError as error:
        sys.exit(f"predicted_time: {error}")
