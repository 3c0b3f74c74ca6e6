"""The harness on a real training: planted faults are caught, and what is measured is what Megatron measures."""

from __future__ import annotations

import os
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_lite.bench import compose, harness
from mindspeed_lite.bench.harness import Job, Outcome
from mindspeed_lite.bench.plan import Arm
from tests.harness import matrix
from tests.harness.checkouts import ROOT
from tests.harness.commands import command
from tests.harness.training import MODEL, NO_DROPOUT

FAULTY_SCRIPT = str(ROOT / "tests" / "bench" / "faulty_script.py")
FEATURE = ("use_fused_rmsnorm",)


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """Of the trainings, which find the project and share the cores with others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        patch.setenv("PYTHONWARNINGS", "ignore")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def job(folder: Path, *, script: str = FAULTY_SCRIPT, timeout: float = 400.0, steps: int = 6,
        nproc: int = 1, extra: tuple[str, ...] = ()) -> Job:  # fmt: skip
    start = [sys.executable]
    if nproc > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    arguments = [*MODEL, *NO_DROPOUT, "--train-iters", "100", *extra]
    return Job((*start, script, *arguments), folder, 2, steps, timeout)


def report(outcomes: list[Outcome], complete: bool = True) -> dict:
    return compose.report(outcomes, complete, None, title="test", created="", command=["x"], settings={})


class Outcomes(dict[str, list[Outcome]]):
    """Real runs by the name of their arm, made when a test first asks for them."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, name: str) -> list[Outcome]:
        arms = {
            "off": Arm(name, "off"),
            "beside slow": Arm("off", "off"),
            "rounding_baseline": Arm(name, "off", arithmetic="float32"),
            "right": Arm(name, "only", (*FEATURE, "use_flash_attn")),
        }
        # The slow one is judged by its interval, and of two pairs little can be said.
        repeats = 3 if name in ("slow", "beside slow") else 1
        # A hang is given longer than a run takes to begin; a step takes a fraction of a second.
        given = job(self._folder, timeout=30.0 if name == "hang" else 400.0)
        arm = arms.get(name, Arm(name, "only", FEATURE))
        self[name] = [harness.run(given, arm, each + 1, profile=name == "right") for each in range(repeats)]
        return self[name]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(tmp_path_factory.mktemp("bench"))


def comparison(outcomes: Outcomes, name: str) -> tuple[dict, dict]:
    off = "beside slow" if name == "slow" else "off"
    chosen = [*outcomes[off], *outcomes[name], *outcomes["rounding_baseline"]]
    found = report(chosen)
    return found["comparisons"][0], found


def failures(found: dict) -> list[str]:
    return [row["text"] for row in found["findings"] if row["severity"] == "failure"]


def test_a_right_feature_agrees(outcomes: Outcomes) -> None:
    row, found = comparison(outcomes, "right")
    assert not failures(found)
    assert row["loss"]["verdict"] == "agrees" and 0 < row["loss"]["times_rounding_baseline"] < 2
    assert row["loss"]["rounding_baseline"]["kind"] == "itself in float32"
    assert row["loss"]["series"][0]["off"] == pytest.approx(5.3, abs=0.5)
    assert len(outcomes["off"][0].steps) == 8
    arms = {arm["name"]: arm for arm in found["arms"]}
    assert arms["off"]["features"] == [] and arms["right"]["features"] == ["use_flash_attn", "use_fused_rmsnorm"]
    assert arms["right"]["numerics"] == "ulp"
    assert found["model"]["tokens_per_step"] == 8 * 64
    assert arms["off"]["summary"]["peak_memory_bytes"] > 1e6


def test_the_profiled_step_is_taken_apart(outcomes: Outcomes) -> None:
    _, found = comparison(outcomes, "right")
    breakdown = {arm["name"]: arm for arm in found["arms"]}["right"]["breakdown"]
    categories = breakdown["categories"]
    assert sum(categories.values()) == pytest.approx(breakdown["wall_seconds"], rel=1e-3)
    for name in ("linear", "attention", "norm", "loss", "optimizer"):
        assert categories[name] > 0, name
    steps = [step for run in outcomes["right"] for step in run.steps]
    assert [step["measured"] for step in steps[:9]] == [False] * 2 + [True] * 6 + [False]


def test_a_rounding_baseline_that_fails_is_a_warning(outcomes: Outcomes) -> None:

    from mindspeed_lite.bench import report as pages

    failed = replace(outcomes["rounding_baseline"][0], status="crashed", reason="signal SIGKILL", log_tail=["killed"])
    found = report([*outcomes["off"], *outcomes["right"], failed])
    assert found["complete"] is True
    assert found["comparisons"][0]["loss"]["verdict"] == "not judged"
    assert {each["severity"] for each in found["findings"]} == {"warning"}
    assert "not judged" in pages.text(found, 200, False)


@matrix.whole
def test_off_is_itself(outcomes: Outcomes) -> None:
    first, *others = ([step["loss"] for step in run.steps] for run in outcomes["beside slow"])
    assert others == [first] * 2


@matrix.whole
def test_a_wrong_loss_is_a_failure(outcomes: Outcomes) -> None:
    row, found = comparison(outcomes, "wrong")
    assert row["loss"]["verdict"] == "differs"
    assert "the training is not the same" in failures(found)[0]


@matrix.whole
def test_a_slow_step_is_said(outcomes: Outcomes) -> None:
    row, found = comparison(outcomes, "slow")
    # Five norms a micro-batch, four micro-batches, 50 ms each.
    on, off = ({arm["name"]: arm for arm in found["arms"]}[name]["summary"]["step_seconds"] for name in ("slow", "off"))
    assert on - off == pytest.approx(5 * 4 * 0.05, rel=0.5)
    assert row["speed"]["ratio"] < 0.5
    assert row["speed"]["verdict"] == "slower", row["speed"]
    assert any("a step is slower" in each["text"] for each in found["findings"])


@matrix.whole
def test_a_crash_keeps_the_other_arm_and_shows_its_log(outcomes: Outcomes) -> None:
    row, found = comparison(outcomes, "crash")
    assert row["speed"] is None and row["loss"] is None
    run = {arm["name"]: arm for arm in found["arms"]}["crash"]["runs"][0]
    assert run["status"] == "crashed" and run["exit_code"] == 1
    assert any("the planted crash" in line for line in run["log_tail"])
    assert {arm["name"]: arm for arm in found["arms"]}["off"]["summary"] is not None
    assert any("crashed" in text for text in failures(found))
    assert found["complete"] is False


@matrix.whole
def test_a_hang_is_ended_and_says_where_it_stood(outcomes: Outcomes) -> None:
    _, found = comparison(outcomes, "hang")
    run = {arm["name"]: arm for arm in found["arms"]}["hang"]["runs"][0]
    assert run["status"] == "hung"
    assert re.search(r"no progress for 30 s after step 1|before its first step", run["reason"]), run["reason"]
    assert any("faulty_script.py" in line for line in run["log_tail"]), "the stack stands in the log"


@matrix.whole
def test_two_processes_and_the_times_megatron_logs(tmp_path: Path) -> None:
    """Step times are Megatron's own to a few per cent; the loss is read from the rank that has it."""
    extra = ("--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "1")
    outcome = harness.run(job(tmp_path, nproc=2, extra=extra), Arm("off", "off"), 1)
    assert outcome.status == "ok", (outcome.reason, outcome.log_tail)
    assert [process.rank for process in outcome.processes] == [0, 1]
    log = (tmp_path / outcome.log).read_text()
    logged = [float(text) for text in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", log)]
    measured = [step["seconds"] * 1e3 for step in outcome.steps]
    assert len(logged) == len(measured) == 8
    assert statistics.median(measured[2:]) == pytest.approx(statistics.median(logged[2:]), rel=0.1)
    printed = [float(text) for text in re.findall(r"lm loss: (\S+)", log)]
    # Megatron's second line is the mean of the first two steps.
    printed[1] = 2 * printed[1] - printed[0]
    for line, step in zip(printed, outcome.steps, strict=True):
        assert step["loss"]["lm loss"] == pytest.approx(line, rel=1e-5)
    assert "exiting program at iteration 8" in log


@matrix.whole
def test_a_command_that_never_trains(tmp_path: Path) -> None:
    for words, text in (
        ([sys.executable, "-c", "print('hello')"], "without a training step of Megatron that could be seen"),
        ([sys.executable, "-c", "import megatron.core"], "Megatron was imported"),
    ):
        outcome = harness.run(Job(tuple(words), tmp_path, 1, 2, 60.0), Arm("off", "off"), 1)
        assert outcome.status == "no steps" and text in str(outcome.reason)


def test_what_ended_a_run_stands_at_the_end_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    code = "import sys; [print('line', n) for n in range(100)]; sys.exit('the reason')"
    outcome = harness.run(Job((sys.executable, "-c", code), tmp_path, 1, 2, 60.0), Arm("off", "off"), 1)
    assert outcome.exit_code == 1 and outcome.log_tail[-1] == "the reason"


@matrix.whole
def test_too_few_steps_are_said(tmp_path: Path) -> None:
    outcome = harness.run(job(tmp_path, timeout=60.0, extra=("--train-iters", "3")), Arm("off", "off"), 1)
    assert outcome.status == "no steps" and "raise --train-iters" in str(outcome.reason)


def test_off_that_fails_ends_the_benchmark_with_its_log(tmp_path: Path) -> None:
    ran = command("bench", "--out", tmp_path, "--", sys.executable, "-c", "raise SystemExit('no such data')")
    assert ran.returncode == 1
    assert "no such data" in ran.stderr and "the command does not run with features off" in ran.stderr
    assert (tmp_path / "report.json").is_file()
