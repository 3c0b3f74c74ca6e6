"""The campaign on a GPU, rehearsed here: steps that go wrong, deadlines, sources, wheels, and its page."""

import json
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import kernels, page, steps, wheels
from benchmarks.gpu.steps import STEPS, STOPPED, Run, Step
from lab import stamps
from mindspeed_lite.bench import isolated
from mindspeed_lite.ops.discovery import OPERATORS
from tests.harness.commands import python

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "docs" / "benchmarks" / "gpu"


@pytest.fixture
def run(tmp_path):
    return Run("cpu", True, tmp_path, {})


@pytest.fixture
def told(monkeypatch):
    """`told(*answers)`: what each process yields, an error at its end; returns the operators asked of each."""

    def set_up(*answers):
        asked, left = [], [*answers]

        def messages(work, seconds):
            asked.append(work.args[0])
            *found, ending = left.pop(0)
            yield from found
            if isinstance(ending, Exception):
                raise ending

        monkeypatch.setattr(isolated, "messages", messages)
        monkeypatch.setattr(steps, "SHAPES", dict.fromkeys(["rope", "adamw", "permute"]))
        return asked

    return set_up


ROWS = {"rows": [], "notes": []}
CRASH = isolated.ProcessEnded(-11, [], 1.0)


def test_an_operator_that_crashes_costs_no_other_and_is_measured_again(run, told):
    asked = told(
        [("", {}), ("rope", {}), ("rope", ROWS), ("adamw", {}), CRASH],
        [("permute", {}), ("permute", {**ROWS, "failed": "wrong"}), None],
        [("adamw", {}), ("adamw", ROWS), ("permute", {}), ("permute", ROWS), None],
    )
    record = {}
    steps._kernels(run, record, 60.0)
    assert record["state"] == "failed" and record["reason"] == "adamw, permute"
    assert record["operators"]["adamw"]["failed"] == str(CRASH)
    steps._kernels(run, record, 60.0)
    assert record["state"] == "complete" and record["operators"].keys() == {"rope", "adamw", "permute"}
    assert asked == [["rope", "adamw", "permute"], ["permute"], ["adamw", "permute"]]


def test_time_that_is_up_is_no_failure_and_a_process_that_does_not_start_is(run, told):
    told([("", {"machine": {}}), ("rope", {}), ("rope", ROWS), None], [CRASH])
    record = {}
    steps._kernels(run, record, 0.0)
    assert record["state"] == "stopped" and not record["operators"] and record["machine"] == {}
    steps._kernels(run, record, 60.0)
    assert record["state"] == "failed" and record["reason"] == str(CRASH)


def test_a_command_ends_at_its_limit(run, tmp_path):
    assert run.ending(["-c", "import time; time.sleep(60)"], tmp_path / "log", 0.7) == STOPPED
    assert run.ending(["-c", "print('x'); raise SystemExit(3)"], tmp_path / "log", 30.0) == "exit code 3"
    assert (tmp_path / "log").read_text() == "x\n"


def test_a_step_is_measured_again_once_its_sources_changed(run, monkeypatch):
    calls = []

    def measured(run, record, limit):
        calls.append(record.update(state="complete", stamp=stamps.of_all()))

    step = Step("tests", "stub", 1.0, 0.0, measured)
    record = {"state": "not started"}
    for _ in range(2):
        step.measure(run, record, 1.0)
    assert len(calls) == 1
    monkeypatch.setattr(stamps, "of_all", lambda: "others")
    step.measure(run, record, 1.0)
    assert len(calls) == 2 and record["stamp"] == "others"


def test_a_stamp_is_that_of_kernels_without_comments_else_of_functions():
    jit = '@triton.jit\ndef kernel(x):\n    """Says."""\n    return x\n'
    assert stamps.digest([jit + "def host(): pass\n"]) == stamps.digest(["# more\n" + jit.replace("Says", "Said")])
    assert stamps.digest([jit]) != stamps.digest([jit.replace("return x", "return x + 1")])
    assert stamps.digest(["def host(): pass\n"]) != stamps.digest(["def host(): return 1\n"])


def test_the_committed_page_names_what_is_older_than_the_code():
    """After a change of kernels: `python -m benchmarks.gpu.page`."""
    found = json.loads((KEPT / "h100.json").read_text())
    text = (KEPT / "h100.md").read_text()
    assert text == page.render(found, "h100.json")
    older = next(line for line in text.splitlines() if "older than the kernels" in line).partition(": ")[2]
    operators = found["steps"]["kernels"]["operators"]
    assert {name for name in operators if f" {name}," in f" {older},"} == {
        name for name, each in operators.items() if each["stamp"] != stamps.of_operator(name)
    }


def test_a_page_that_fails_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "render", lambda found, data: 1 / 0)
    page.write(page.blank(True), "h100", [tmp_path])
    assert "could not be rendered: ZeroDivisionError" in (tmp_path / "h100.md").read_text()
    assert page.newest([tmp_path / "h100.json", tmp_path / "none.json"]) == page.blank(True)


def test_readme_takes_the_trainings_of_a_campaign(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import generate

    rows = generate._gpu_results()
    readme = (ROOT / "README.md").read_text()
    assert rows and all(f"| {' | '.join(row)} |" in readme for row in rows)
    dense = json.loads((KEPT / "h100.json").read_text())["steps"]["dense"]
    compared = page.compare(dense)
    assert compared.speed.split()[0] in rows[0][3] and compared.seconds[0] == sum(dense["arms"]["off"]["steps"]) / 2


def test_the_steps_fit_the_time_and_time_every_operator_with_a_kernel():
    assert sum(step.seconds for step in STEPS) <= command.SECONDS == 570.0
    assert all(step.least <= step.seconds for step in STEPS)
    assert {*kernels.SHAPES} | {*kernels.WITHOUT_KERNEL} == {*OPERATORS}


def test_the_page_is_named_after_the_device():
    assert command.page_name("NVIDIA H100 80GB HBM3") == "h100"
    assert command.page_name("NVIDIA GeForce RTX 4090") == "nvidia-geforce-rtx-4090"


def test_wheels_are_checked_and_unpacked_once(tmp_path):
    with pytest.raises(wheels.WheelError, match="0 wheels of megatron-core"):
        wheels.unpack(tmp_path, tmp_path / "unpacked")
    for each in wheels.WHEELS:
        name, version = each.split("==")
        with zipfile.ZipFile(tmp_path / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{name}/__init__.py", "")
    found = wheels.unpack(tmp_path, tmp_path / "unpacked")
    marked = found[0] / "marked"
    marked.write_text("")
    assert wheels.unpack(tmp_path, tmp_path / "unpacked") == found and marked.exists()
    next(tmp_path.glob("liger*.whl")).write_text("no zip")
    with pytest.raises(wheels.WheelError, match="cannot read liger_kernel"):
        wheels.unpack(tmp_path, tmp_path / "unpacked")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cpu"], ["--device cpu", "--tiny"]),
        (["--tiny", "--seconds", "-1"], ["--seconds", "above 0"]),
        (["--tiny", "--only", "tense"], ["--only", "tense", "dense"]),
        (["--tiny", "--device", "cpu", "--wheels", "/nowhere"], ["/nowhere", "benchmarks.gpu.wheels"]),
    ],
)
def test_bad_input_is_one_line(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1 and all(word in said for word in words), said


@pytest.mark.whole
def test_the_campaign_end_to_end(tmp_path):
    ran = python("-m", "benchmarks.gpu", "--device", "cpu", "--tiny", "--fresh", cwd=ROOT, path=[ROOT], timeout=1200,
                 OUT=tmp_path)  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads((tmp_path / "cpu.json").read_text())
    assert {step["state"] for name, step in found["steps"].items() if "Liger" not in name} == {"complete"}
    assert found["steps"]["kernels"]["operators"].keys() == kernels.SHAPES.keys()
    text = (tmp_path / "cpu.md").read_text()
    assert text == page.render(found, "cpu.json") and "older than the kernels: none" in text
    assert found["steps"]["tests"]["tests"]
    assert str(ROOT) not in text and sys.executable not in text
