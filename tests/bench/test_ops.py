"""bench-ops: a wrong answer gets no time, the report, and the command."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mindspeed_lite import cli, platform
from mindspeed_lite.bench import ceiling, timing
from mindspeed_lite.bench.operators import run
from mindspeed_lite.cli import bench_ops
from mindspeed_lite.ops.case import DTYPES, Contender, OwnLayout, Problem, Work
from mindspeed_lite.ops.discovery import OPERATORS, cases
from tests.harness.commands import command, fails_in_one_line

DOC = Path(__file__).resolve().parents[2] / "docs" / "bench-report.md"
CPU = platform.device("cpu")
FAST = timing.Effort(sample_seconds=0.0, rounds=(3, 3), seconds=0.0, warmup=1)


@pytest.fixture(autouse=True)
def cheap(monkeypatch):
    """A ceiling that takes no time, rounds that are few, and the allocator of this process left alone."""
    measured = ceiling.Ceiling(1e11, 1e10, "measured: not at all")
    monkeypatch.setattr(ceiling, "measure", lambda device, dtype: measured)
    monkeypatch.setattr(timing, "QUICK", FAST)
    monkeypatch.setenv("MINDSPEED_LITE_ALLOCATOR", "system")


def tiny(*contenders):
    """y = 2 x as ours and as plain torch, next to other contenders."""
    return Problem(
        operator="double",
        name="4",
        device="cpu",
        dtype=torch.float32,
        make=lambda: (torch.arange(1.0, 5.0).requires_grad_(),),
        forward=Work(32, 4),
        both=Work(64, 8),
        contenders=(
            Contender("mindspeed_lite", lambda: lambda x: 2 * x),
            Contender("torch", lambda: lambda x: x + x),
            *contenders,
        ),
    )


def measured(*contenders, case=None, **keywords):
    return run.run([case or tiny(*contenders)], CPU, torch.float32, FAST, **keywords)


def contender(report, name, row=0):
    return next(each for each in report["rows"][row]["contenders"] if each["name"] == name)


@pytest.mark.parametrize(
    ("planted", "word"),
    [
        (lambda x: 2.1 * x, "output differs"),
        (lambda x: 2 * x.detach() + 0 * x, "gradient of input 1"),
        (lambda x: 2 * x if torch.is_grad_enabled() else x, "output without gradients"),
        (lambda x: 2 * x * float("nan"), "inf"),
        (lambda x: (2 * x).double(), "torch.float64"),
        (lambda x: (2 * x)[None], "(1, 4)"),
    ],
)
def test_every_way_to_be_wrong_is_caught_and_not_timed(planted, word):
    report = measured(Contender("wrong", lambda: planted), Contender("near", lambda: lambda x: 2 * x * (1 + 1e-6)))
    wrong = contender(report, "wrong")
    assert wrong["seconds"] is None and wrong["ratio"] is None
    assert "does not agree with ours" in wrong["error"] and word in wrong["error"]
    assert any(each["severity"] == "warning" and "wrong" in each["text"] for each in report["findings"])
    assert contender(report, "near")["error"] is None and report["complete"]


def test_what_fails_has_its_error_and_the_others_their_times():
    def no_compiler():
        raise ImportError("no C++ compiler")

    report = measured(Contender("peer", no_compiler))
    assert contender(report, "peer")["error"] == "ImportError: no C++ compiler"
    assert any(each["severity"] == "note" and "no C++ compiler" in each["text"] for each in report["findings"])
    broken = Contender("mindspeed_lite", lambda: lambda x: x / [])
    report = measured(case=replace(tiny(), contenders=(broken, *tiny().contenders[1:])))
    assert "TypeError" in contender(report, "mindspeed_lite")["error"]
    assert contender(report, "torch")["seconds"] > 0 and contender(report, "torch")["ratio"] is None
    assert report["findings"][0]["severity"] == "failure"
    report = measured(case=replace(tiny(), make=lambda: 1 / 0))
    assert {each["error"] for each in report["rows"][0]["contenders"]} == {"ZeroDivisionError: division by zero"}


def test_a_library_with_a_layout_of_its_own_is_timed_in_it():
    seen = []

    def call(left, right):
        seen.append((left.requires_grad, right.requires_grad))
        return left * 2, right * 2

    function = OwnLayout(lambda x: (x[:2].clone(), x[2:].clone()), call, "two parts", torch.cat)
    report = measured(Contender("parts", lambda: function))
    assert [contender(report, "parts", row)["error"] for row in (0, 1)] == [None, None]
    # Compared without and with gradients; forward without, and both with gradients.
    assert seen[:2] == [(False, False), (True, True)] and {(False, False), (True, True)} == set(seen[2:])
    notes = [each["text"] for each in report["findings"] if "parts" in each["text"]]
    assert notes[0] == "parts in double, not part of its time: two parts"
    wrong = replace(function, restore=lambda parts: torch.cat(parts[::-1]))
    assert "does not agree" in contender(measured(Contender("parts", lambda: wrong)), "parts")["error"]


def test_the_report_has_the_fields_of_its_page():
    """Outside parentheses, in code, the meaning of a field names the fields within."""
    text = DOC.read_text().split('## `kind: "bench-ops"`\n', 1)[1]
    documented = {
        name: set(re.findall(r"`(\w+)`", re.sub(r"\([^()]*\)", "", meaning)))
        for names, meaning in re.findall(r"^\| (`[^|]*) \| ?(.*) \|$", text, re.M)
        for name in re.findall(r"`(\w+)`", names)
    }
    report = measured(Contender("wrong", lambda: lambda x: 3 * x))
    assert set(re.findall(r"`(\w+)`", text.partition("a list:")[0])) == set(report) - {"command"}
    for row in report["rows"]:
        assert set(row) == set(documented)
        assert all(set(each) == documented["contenders"] | {"ratio_low", "ratio_high"} for each in row["contenders"])
    json.loads(json.dumps(report, allow_nan=False))


def test_shares_of_the_nearer_ceiling():
    report = measured()
    assert [row["direction"] for row in report["rows"]] == ["forward", "forward+backward"]
    row, ours = report["rows"][0], contender(report, "mindspeed_lite")
    assert row["bound"] == "memory" and ours["ratio"] == ours["ratio_low"] == ours["ratio_high"] == 1
    assert ours["bytes_per_second"] == pytest.approx(32 / ours["seconds"])
    assert ours["of_ceiling"] == pytest.approx(ours["bytes_per_second"] / 1e10)
    report = measured(case=replace(tiny(), forward=Work(32, 10**9)))
    ours = contender(report, "mindspeed_lite")
    assert report["rows"][0]["bound"] == "compute"
    assert ours["of_ceiling"] == pytest.approx(ours["flops_per_second"] / 1e11)


def test_the_ceiling_of_a_row_is_measured_before_its_operator_and_the_highest_is_the_reports(monkeypatch):
    found = iter([ceiling.Ceiling(2e11, 1e10, "first"), ceiling.Ceiling(1e11, 3e10, "second")])
    monkeypatch.setattr(ceiling, "measure", lambda device, dtype: next(found))
    problems = [replace(tiny(), both=None, operator=name) for name in ("double", "triple")]
    report = run.run(problems, CPU, torch.float32, FAST)
    assert [row["ceiling_per_second"] for row in report["rows"]] == [1e10, 3e10]
    assert report["ceiling"] == {"flops_per_second": 2e11, "bytes_per_second": 3e10, "source": "first"}


def test_being_slower_than_plain_torch_is_a_warning():
    row = measured()["rows"][0]
    for high, expected in ((0.6, ["warning"]), (1.1, [])):
        row["contenders"][1].update(ratio=0.5, ratio_low=0.4, ratio_high=high)
        findings = run.Findings()
        run._judge(row, findings)
        assert [each["severity"] for each in findings if "slower than torch" in each["text"]] == expected


def test_an_interruption_leaves_what_is_finished():
    def interrupt(done, total, what):
        if done == 1:
            raise KeyboardInterrupt

    problems = [replace(tiny(), name=name) for name in "456"]
    report = run.run(problems, CPU, torch.float32, FAST, tell=interrupt)
    assert not report["complete"] and {row["case"] for row in report["rows"]} == {"4"}
    assert "interrupted after 1 of 3" in report["findings"][0]["text"]


# The command line

RMS_NORM = ["--device", "cpu", "--op", "rms_norm", "--shapes", "16x8", "--quick", "--json"]


def printed(capsys, *arguments, code=0):
    assert cli.main(["bench-ops", *RMS_NORM, *arguments]) == code
    return json.loads(capsys.readouterr().out)


def test_shapes_belong_to_one_operator(capsys):
    arguments = ["bench-ops", "--device", "cpu", "--quick", "--json", "--dtype", "fp32", "--shapes", "8x8", "8x8"]
    assert cli.main(arguments) == 2 and "give it with one --op" in " ".join(capsys.readouterr().err.split())
    assert cli.main([*arguments, "--op", "rms_norm"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["case"] for row in rows] == ["8x8 fp32"] * 2
    assert "torch.compile" not in {each["name"] for row in rows for each in row["contenders"]}


def test_dtypes_are_those_of_the_ceiling():
    assert set(bench_ops.DTYPES) == set(ceiling.DTYPES) == set(DTYPES)


def test_the_list_has_every_shape(capsys):
    assert cli.main(["bench-ops", "--list"]) == 0
    said = capsys.readouterr().out
    assert all(cases(name).cpu[0] in said and name in said for name in OPERATORS)


def test_the_command_end_to_end(tmp_path):
    ran = command("bench-ops", "--quick", "--device", "cpu", "--op", "rms_norm", "--shapes", "32x16", "--out", tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "rms_norm" in ran.stdout and "32x16" in ran.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["complete"] and len(report["rows"]) == 2 and report["command"][:2] == ["mindspeed-lite", "bench-ops"]
    assert {"report.json", "report.md", "report.html", *report["files"]["plots"]} == {
        path.name for path in tmp_path.iterdir()
    }
    fails_in_one_line(command("bench-ops", "--dtype", "int3"), "--dtype")


def test_nothing_measured_is_a_failure(monkeypatch, capsys):
    from tests.bench import reports as bench_reports

    report = bench_reports.operators()
    for row in report["rows"]:
        for contender in row["contenders"]:
            contender |= {"seconds": None, "of_ceiling": None, "ratio": None, "error": "out of memory"}
    monkeypatch.setattr(bench_ops, "_measure", lambda *given: {**report, "complete": True})
    assert cli.main(["bench-ops", "--op", "rms_norm"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("error: nothing was measured: out of memory")
