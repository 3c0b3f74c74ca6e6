"""bench-ops: that a wrong answer gets no time, what counts as a regression, the report, and the command."""

import copy
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mindspeed_lite import cli, platform
from mindspeed_lite.bench import ceiling, timing
from mindspeed_lite.bench.operators import earlier, run
from mindspeed_lite.cli import bench_ops
from mindspeed_lite.cli.terminal import CommandError
from mindspeed_lite.json_file import JsonFileError
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


def measured(*contenders, **keywords):
    return run.run([tiny(*contenders)], CPU, torch.float32, FAST, **keywords)


def contender(report, name, row=0):
    return next(each for each in report["rows"][row]["contenders"] if each["name"] == name)


# Equivalence


def test_a_wrong_contender_is_caught_and_not_timed():
    report = measured(Contender("wrong", lambda: lambda x: 2.1 * x))
    wrong = contender(report, "wrong")
    assert wrong["seconds"] is None and wrong["ratio"] is None and "does not agree with ours" in wrong["error"]
    assert any(each["severity"] == "warning" and "wrong" in each["text"] for each in report["findings"])
    assert contender(report, "torch")["error"] is None and report["complete"]


@pytest.mark.parametrize(
    ("planted", "word"),
    [
        (lambda x: 2 * x.detach() + 0 * x, "gradient of input 1"),
        (lambda x: 2 * x if torch.is_grad_enabled() else x, "output without gradients"),
        (lambda x: 2 * x * float("nan"), "nan"),
        (lambda x: (2 * x).double(), "torch.float64"),
        (lambda x: (2 * x)[None], "(1, 4)"),
    ],
)
def test_every_way_to_be_wrong_is_caught(planted, word):
    assert word in contender(measured(Contender("wrong", lambda: planted)), "wrong")["error"]


def test_rounding_is_no_disagreement():
    error = contender(measured(Contender("near", lambda: lambda x: 2 * x * (1 + 1e-6))), "near")["error"]
    assert error is None


def test_a_contender_that_fails_has_its_error():
    def no_compiler():
        raise ImportError("no C++ compiler")

    report = measured(Contender("peer", no_compiler))
    assert contender(report, "peer")["error"] == "ImportError: no C++ compiler"
    assert any(each["severity"] == "note" and "no C++ compiler" in each["text"] for each in report["findings"])


def test_without_ours_the_others_still_have_times():
    case = tiny()
    broken = Contender("mindspeed_lite", lambda: lambda x: x / [])
    report = run.run([replace(case, contenders=(broken, *case.contenders[1:]))], CPU, torch.float32, FAST)
    assert "TypeError" in contender(report, "mindspeed_lite")["error"]
    assert contender(report, "torch")["seconds"] > 0 and contender(report, "torch")["ratio"] is None
    assert report["findings"][0]["severity"] == "failure"


def test_inputs_that_do_not_fit_are_an_error_of_every_contender():
    def too_large():
        raise MemoryError("no room")

    report = run.run([replace(tiny(), make=too_large)], CPU, torch.float32, FAST)
    assert {each["error"] for each in report["rows"][0]["contenders"]} == {"MemoryError: no room"}


# The report


def fields(heading):
    """Field -> the names that its meaning puts in code, outside parentheses, from the tables of a section."""
    text = DOC.read_text().split(f"## {heading}\n", 1)[1]
    text = re.split(r"\n## ", text, maxsplit=1)[0]
    found = {}
    for names, meaning in re.findall(r"^\| (`[^|]*) \|(?: [a-z ]+ \|)? ?(.*) \|$", text, re.M):
        outside = re.sub(r"\([^()]*\)", "", meaning)
        for name in re.findall(r"`(\w+)`", names):
            found[name] = (set(re.findall(r"`(\w+)`", outside)), set(re.findall(r"`(\w+)`", meaning)))
    return text, found


def test_the_report_has_the_fields_of_its_page():
    report = measured(Contender("wrong", lambda: lambda x: 3 * x))
    _, shared = fields('`kind: "bench"`')
    text, own = fields('`kind: "bench-ops"`')
    before = text.partition("as above")[0]
    top = set(re.findall(r"`(\w+)`", before)) | {"rows"}
    assert {"schema_version", "environment", "findings"} <= top <= set(report)
    assert report["schema_version"] == 1 and report["kind"] == "bench-ops"
    for field in ("settings", "environment", "ceiling"):
        required, _ = shared[field]
        assert required and required <= set(report[field]), field
    assert shared["findings"][0] == set(report["findings"][0])
    for row in report["rows"]:
        assert set(row) == set(own)
        required, named = own["contenders"]
        required |= {"ratio_low", "ratio_high"}
        for each in row["contenders"]:
            assert set(each) == required and required <= named
    assert own["earlier"][0] == set(earlier.judge(report["rows"][0], report["ceiling"], loaded(report)))
    json.loads(json.dumps(report, allow_nan=False))


def test_shares_of_the_ceiling():
    report = measured()
    assert [row["direction"] for row in report["rows"]] == ["forward", "forward+backward"]
    row, ours = report["rows"][0], contender(report, "mindspeed_lite")
    assert row["bound"] == "memory" and ours["ratio"] == ours["ratio_low"] == ours["ratio_high"] == 1
    assert ours["bytes_per_second"] == pytest.approx(32 / ours["seconds"])
    assert ours["of_ceiling"] == pytest.approx(ours["bytes_per_second"] / 1e10)


def test_a_ceiling_that_is_higher_at_the_end_is_the_one_that_counts(monkeypatch):
    found = iter([ceiling.Ceiling(2e11, 1e10, "at first"), ceiling.Ceiling(1e11, 3e10, "at the end")])
    monkeypatch.setattr(ceiling, "measure", lambda device, dtype: next(found))
    report = measured()
    assert report["ceiling"] == {"flops_per_second": 2e11, "bytes_per_second": 3e10, "source": "at first"}
    ours = contender(report, "mindspeed_lite")
    assert ours["of_ceiling"] == pytest.approx(ours["bytes_per_second"] / 3e10)


def test_the_ceiling_of_a_row_is_measured_beside_its_operator(monkeypatch):
    found = iter([ceiling.Ceiling(1e11, bandwidth, "measured") for bandwidth in (1e10, 3e10, 2e10)])
    monkeypatch.setattr(ceiling, "measure", lambda device, dtype: next(found))
    cases = [tiny(), replace(tiny(), operator="triple")]
    report = run.run([replace(each, both=None) for each in cases], CPU, torch.float32, FAST)
    assert [row["ceiling_per_second"] for row in report["rows"]] == [3e10, 3e10]
    found = iter([ceiling.Ceiling(1e11, bandwidth, "measured") for bandwidth in (1e10, 2e10, 3e10)])
    report = run.run([replace(each, both=None) for each in cases], CPU, torch.float32, FAST)
    assert [row["ceiling_per_second"] for row in report["rows"]] == [2e10, 3e10]
    assert report["ceiling"]["bytes_per_second"] == 3e10


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
    full = replace(function, arrange=lambda x: (x.clone(),) if x.requires_grad else 1 / 0, call=lambda x: 2 * x,
                   restore=lambda x: x)  # fmt: skip
    assert "ZeroDivisionError" in contender(measured(Contender("parts", lambda: full)), "parts")["error"]


def test_the_nearer_ceiling_is_the_bound():
    case = replace(tiny(), forward=Work(32, 10**9))
    report = run.run([case], CPU, torch.float32, FAST)
    assert report["rows"][0]["bound"] == "compute"
    ours = contender(report, "mindspeed_lite")
    assert ours["of_ceiling"] == pytest.approx(ours["flops_per_second"] / 1e11)


def test_being_slower_than_plain_torch_is_a_warning():
    row = measured()["rows"][0]
    for each in row["contenders"]:
        each.update(ratio=0.5, ratio_low=0.4, ratio_high=0.6)
    findings = []
    run._judge(row, findings)
    assert [each["severity"] for each in findings] == ["warning"] and "slower than torch" in findings[0]["text"]
    row["contenders"][1].update(ratio_high=1.1)
    findings.clear()
    run._judge(row, findings)
    assert not findings


def test_an_interruption_leaves_what_is_finished():
    def interrupt(done, total, what):
        if done == 1:
            raise KeyboardInterrupt

    cases = [tiny(), replace(tiny(), name="5"), replace(tiny(), name="6")]
    report = run.run(cases, CPU, torch.float32, FAST, tell=interrupt)
    assert not report["complete"] and {row["case"] for row in report["rows"]} == {"4"}
    assert "interrupted after 1 of 3" in report["findings"][0]["text"]


# An earlier report


def loaded(report):
    found = json.loads(json.dumps({"kind": earlier.KIND, "schema_version": earlier.SCHEMA_VERSION, **report}))
    return earlier._REPORT(found)


def row_taking(seconds, spread=0.05, bound="memory"):
    ours = {"name": "mindspeed_lite", "seconds": seconds, "low": seconds * (1 - spread), "high": seconds * (1 + spread)}
    names = ("operator", "case", "direction", "device", "dtype")
    return dict.fromkeys(names, "x") | {"bound": bound, "contenders": [ours]}


def verdict(now, then, now_ceiling=1e10, **keywords):
    row, before = row_taking(now, **keywords), row_taking(then, **keywords)
    ceilings = {"flops_per_second": 1e11, "bytes_per_second": now_ceiling}
    report = {"rows": [before], "environment": {"device": "x"}}
    report["ceiling"] = {"flops_per_second": 1e11, "bytes_per_second": 1e10}
    return earlier.judge(row, ceilings, loaded(report))


def test_a_regression_is_found_and_noise_is_not():
    assert verdict(1.5, 1.0)["verdict"] == "regression" and verdict(1.5, 1.0)["ratio"] == pytest.approx(1.5)
    assert verdict(0.5, 1.0)["verdict"] == "faster"
    assert verdict(1.05, 1.0)["verdict"] == "same"
    assert verdict(1.5, 1.0, spread=0.3)["verdict"] == "same"  # the spreads overlap
    assert verdict(1.08, 1.0, spread=0.001)["verdict"] == "same"  # apart, and less than the ceilings are worth


def test_each_time_is_against_the_ceiling_of_its_own_run():
    assert verdict(2.0, 1.0, now_ceiling=0.5e10)["verdict"] == "same"  # half the machine, twice the time
    assert verdict(1.0, 1.0, now_ceiling=2e10)["verdict"] == "regression"
    assert verdict(1.0, 1.0, now_ceiling=2e10, bound="compute")["verdict"] == "same"


def test_a_row_without_a_counterpart_has_no_verdict():
    report = measured()
    other = copy.deepcopy(report)
    for row in other["rows"]:
        row["case"] = "another"
    other["environment"]["device"] = "another device"
    found = measured(before=loaded(other))
    assert [row["earlier"] for row in found["rows"]] == [None, None]
    said = " ".join(each["text"] for each in found["findings"])
    assert "2 of 2 rows have no counterpart" in said and "another device" in said


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (None, "cannot be read"),
        ("{", "not JSON"),
        ("[]", "want an object"),
        ('{"kind": "bench", "schema_version": 1}', 'kind: want "bench-ops", not "bench"'),
        ('{"kind": "bench-ops", "schema_version": 2}', "schema_version: want 1, not 2"),
        ('{"kind": "bench-ops", "schema_version": 1, "ceiling": null}', "ceiling: want an object, not null"),
    ],
)
def test_an_earlier_report_that_cannot_be_used_is_one_error(tmp_path, capsys, text, word):
    file = tmp_path / "report.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(JsonFileError, match=word):
        earlier.load(str(file))
    assert cli.main(["bench-ops", "--compare", str(file)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--compare" in said and word in said


# The command line

RMS_NORM = ["--device", "cpu", "--op", "rms_norm", "--shapes", "16x8", "--quick", "--json"]


def printed(capsys, *arguments, code=0):
    assert cli.main(["bench-ops", *RMS_NORM, *arguments]) == code
    return json.loads(capsys.readouterr().out)


def test_comparing_with_oneself_and_with_someone_faster(tmp_path, capsys):
    report = printed(capsys)
    for row in report["rows"]:
        for each in row["contenders"]:
            each.update(seconds=each["seconds"] / 1e4, low=each["low"] / 1e4, high=each["high"] / 1e4)
    (tmp_path / "report.json").write_text(json.dumps(report))
    found = printed(capsys, "--compare", str(tmp_path), code=1)
    assert [row["earlier"]["verdict"] for row in found["rows"]] == ["regression"] * 2
    assert [each["severity"] for each in found["findings"]][:2] == ["failure"] * 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--op", "rms_nrm"], ["--op", "did you mean rms_norm?"]),
        (["--shapes", "16x16"], ["--shapes", "NAME:16x16"]),
        (["--op", "rms_norm", "--shapes", "16"], ["--shapes", "'16'", "ROWSxHIDDEN"]),
        (["--op", "rms_norm", "--shapes", "attention:s=1,n=1,d=1"], ["not among the --op"]),
        (["--shapes", "atention:s=1,n=1,d=1"], ["did you mean attention?"]),
        (["--device", "cuda"], ["--device", "no CUDA"]),
        (["--device", "cpu", "--against", "apex"], ["--against apex", "not installed", "build NVIDIA Apex"]),
    ],
)
def test_bad_input_is_one_line_before_anything_is_measured(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(ceiling, "measure", lambda device, dtype: pytest.fail("measured"))
    assert cli.main(["bench-ops", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(word in said for word in words), said


def test_peers_that_were_asked_for_must_be_there_and_have_the_operators(capsys, monkeypatch):
    declared = {(peer, each.package) for name in OPERATORS for peer, each in cases(name).peers.items() if each.package}
    assert declared == {(name, module) for name, (module, _) in bench_ops.PEERS.items()}
    missing = ["--device", "cpu", "--op", "adamw", "--against", "liger"]
    monkeypatch.setattr(bench_ops.importlib.util, "find_spec", lambda name: None if name == "liger_kernel" else name)
    assert cli.main(["bench-ops", *missing]) == 2
    assert "--against liger: it is not installed: pip install 'mindspeed-lite[compare]'" in capsys.readouterr().err
    monkeypatch.setattr(bench_ops.importlib.util, "find_spec", lambda name: name)
    assert cli.main(["bench-ops", *missing]) == 2 and "need a CUDA device, and this is cpu" in capsys.readouterr().err
    given = {"device": "cuda", "dtype": torch.bfloat16, "quick": False, "against": ["liger"]}
    with pytest.raises(CommandError, match="--against liger: it has none of these operators: adamw"):
        bench_ops.chosen_problems({"adamw": []}, **given)
    problems = bench_ops.chosen_problems({"adamw": [], "rms_norm": []}, **given)
    found = {each.operator: [one.name for one in each.contenders] for each in problems}
    assert found["rms_norm"][3:] == ["liger"] and "liger" not in found["adamw"]


def test_an_unwritable_folder_is_said_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ceiling, "measure", lambda device, dtype: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    assert cli.main(["bench-ops", *RMS_NORM, "--out", str(tmp_path / "file")]) == 2
    assert "--out: cannot write into" in capsys.readouterr().err


def test_shapes_of_several_operators(capsys):
    arguments = ["--device", "cpu", "--quick", "--json", "--dtype", "fp32"]
    code = cli.main(
        ["bench-ops", *arguments, "--shapes", "rms_norm:8x8", "attention:s=4,n=2,d=8", "--shapes", "rms_norm:8x8"]
    )
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert code == 0 and len(rows) == 4
    assert {row["case"] for row in rows} == {"8x8 fp32", "s=4,n=2,d=8 fp32"}
    assert "torch.compile" not in {each["name"] for row in rows for each in row["contenders"]}


def test_dtypes_are_those_of_the_ceiling():
    assert set(bench_ops.DTYPES) == set(ceiling.DTYPES) == set(DTYPES)


def test_help_names_every_shape(capsys):
    assert cli.main(["bench-ops", "--help"]) == 0
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
    from tests.harness import bench_reports

    report = bench_reports.operators()
    for row in report["rows"]:
        row["earlier"] = None
        for contender in row["contenders"]:
            contender |= {"seconds": None, "of_ceiling": None, "ratio": None, "error": "out of memory"}
    monkeypatch.setattr(bench_ops, "_measure", lambda options, command: {**report, "complete": True})
    assert cli.main(["bench-ops", "--op", "rms_norm"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("error: nothing was measured: out of memory")
