"""The campaign on a GPU, rehearsed here: parts that go wrong, deadlines, kills, and its page end to end."""

import json
import os
import shutil
import sys
import time
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import page, parts, wheels
from benchmarks.gpu.campaign import Campaign
from benchmarks.gpu.operators import SHAPES
from benchmarks.gpu.parts import PARTS, Part
from mindspeed_lite.ops.discovery import OPERATORS
from tests.harness.commands import python

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def campaign(tmp_path):
    """`campaign(*units)` is one whose `decisions` are these stubs; it resumes what an earlier one has left."""

    def made(*units: str) -> Campaign:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "STUB": str(tmp_path), "UNITS": "\n".join(units)}
        found = Campaign("h100", "cpu", False, tmp_path / "scratch", tmp_path / "out", environment)
        found.resume([tmp_path / "scratch"])
        return found

    return made


def stub(seconds=30.0, least=0.0, unit_seconds=10.0, workers=1, name="decisions"):
    return Part(name, "stubs", "tests.bench.gpu_stub", seconds, least, unit_seconds, workers)


def run(campaign, part, seconds=60.0):
    code = campaign.run([part], time.monotonic() + seconds)
    written = json.loads((campaign.out / "h100.json").read_text())
    record = next(each for each in written["parts"] if each["name"] == part.name)
    assert (campaign.out / "h100.md").read_text() == page.render(written, "h100.json")
    return code, record, {name: unit["state"] for name, unit in record["units"].items()}


def runs(tmp_path):
    return (tmp_path / "runs").read_text().split("\n")[:-1]


def test_a_unit_that_crashes_or_raises_costs_no_other(campaign, tmp_path):
    code, record, states = run(campaign("works", "crashes", "raises", "skips", "finds", "last"), stub())
    assert code == 1 and record["state"] == "complete"
    assert states == {
        "works": "ok", "crashes": "failed", "raises": "failed", "skips": "skipped", "finds": "failed", "last": "ok",
    }  # fmt: skip
    assert "exit code -11" in record["units"]["crashes"]["reason"]
    assert record["units"]["raises"]["reason"] == "ValueError: out of luck"
    # The next call measures again what failed or was skipped.
    run(campaign("works", "crashes", "raises", "skips", "finds", "last"), stub())
    assert runs(tmp_path)[6:] == ["crashes", "raises", "skips", "finds"]


def test_a_unit_that_hangs_is_ended_and_the_next_one_runs(campaign):
    _, record, states = run(campaign("sleeps 60", "works"), stub(unit_seconds=3.0))
    assert states == {"sleeps 60": "failed", "works": "ok"} and record["state"] == "complete"
    assert "took more than 3 s" in record["units"]["sleeps 60"]["reason"]


def test_a_part_stops_at_its_limit_and_the_next_call_goes_on(campaign, tmp_path):
    _, record, states = run(campaign("works", "sleeps 60", "last"), stub(seconds=4.0), seconds=4.0)
    assert states == {"works": "ok", "sleeps 60": "stopped"} and record["reason"] == "its time was up"
    _, record, states = run(campaign("works", "sleeps 0", "last"), stub())
    assert states["last"] == "ok" and runs(tmp_path) == ["works", "sleeps 60", "sleeps 0", "last"]


def test_a_part_starts_only_with_its_least_time_and_slack_goes_to_later_parts(campaign, monkeypatch):
    _, record, _ = run(campaign("works"), stub(least=20.0), seconds=10.0)
    assert record["state"] == "not started" and "needs 20" in record["reason"]
    limits = []
    monkeypatch.setattr(Campaign, "_measure", lambda self, part, record, limit: limits.append(round(limit)))
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    first, second = stub(seconds=30, name="decisions"), stub(seconds=20, name="operators")
    for deadline in (60.0, 40.0, 10.0):
        campaign("works").run([first, second], deadline)
    assert limits == [40, 60, 30, 40, 10, 10]


def test_shares_divide_the_units(campaign, tmp_path):
    _, _, states = run(campaign(*"abcdefg"), stub(workers=3))
    assert states == dict.fromkeys("abcdefg", "ok") and sorted(runs(tmp_path)) == [*"abcdefg"]


def test_a_module_that_does_not_load_is_one_failure(campaign):
    broken = Part("decisions", "none", "tests.bench.no_such_module", 30.0, 0.0, 10.0)
    code, record, _ = run(campaign(), broken)
    assert code == 1 and "no_such_module" in record["units"]["start"]["reason"]


def test_the_parts_fit_the_time_and_measure_every_operator():
    assert sum(part.seconds for part in PARTS) < parts.SECONDS == 570.0
    assert all(part.least <= part.seconds for part in PARTS)
    from benchmarks.gpu import decisions

    assert {unit.name for unit in decisions.units("decisions", "cpu", True)} | {*SHAPES} == {*OPERATORS}


def test_the_page_is_named_after_the_device():
    assert command.page_name("NVIDIA H100 80GB HBM3") == "h100"
    assert command.page_name("NVIDIA GeForce RTX 4090") == "nvidia-geforce-rtx-4090"


def wheel(folder, requirement, requires=""):
    name, version = requirement.split("==")
    path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "answer = 42")
        needs = f"Requires-Dist: {requires}\n" if requires else ""
        archive.writestr(f"{name}-{version}.dist-info/METADATA", f"Name: {name}\nVersion: {version}\n{needs}")
    return path


def test_wheels_are_checked_and_unpacked_once(tmp_path):
    with pytest.raises(wheels.WheelError, match=r"no \*.whl"):
        wheels.check(tmp_path)
    made = {each: wheel(tmp_path, each) for each in wheels.WHEELS}
    before = [*sys.path]
    found = wheels.unpack(tmp_path, tmp_path / "unpacked")
    sys.path[:] = before
    assert len(found) == len(made)
    marked = found[0] / "marked"
    marked.write_text("")
    assert wheels.unpack(tmp_path, tmp_path / "unpacked") == found and marked.exists()
    sys.path[:] = before
    name = "pydantic==" + wheels.WHEELS[2].partition("==")[2]
    wheel(tmp_path, name, "absent>=1")
    with pytest.raises(wheels.WheelError, match="pydantic requires absent>=1"):
        wheels.check(tmp_path)
    wheel(tmp_path, name, "pydantic-core==0.1")
    with pytest.raises(wheels.WheelError, match=r"pydantic requires pydantic-core==0\.1, and .* has 2"):
        wheels.check(tmp_path)
    wheel(tmp_path, name)
    wheel(tmp_path, "liger-kernel==0.1")
    with pytest.raises(wheels.WheelError, match="several wheels of liger-kernel"):
        wheels.check(tmp_path)
    (tmp_path / "liger_kernel-0.1-py3-none-any.whl").write_text("no zip")
    with pytest.raises(wheels.WheelError, match=r"cannot read liger_kernel-0\.1"):
        wheels.check(tmp_path)
    (tmp_path / "liger_kernel-0.1-py3-none-any.whl").unlink()
    made[wheels.WHEELS[0]].unlink()
    with pytest.raises(wheels.WheelError, match="megatron-core not at all"):
        wheels.check(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cpu"], ["--device cpu", "--tiny"]),
        (["--tiny", "--seconds", "0"], ["--seconds", "above 0"]),
        (["--tiny", "--only", "tense"], ["--only", "tense", "dense"]),
        (["--tiny", "--device", "cpu", "--wheels", "/nowhere"], ["/nowhere", "benchmarks.gpu.wheels"]),
    ],
)
def test_bad_input_is_one_line(arguments, words, capsys):
    assert command.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(word in said for word in words), said


@pytest.mark.parametrize(
    "names",
    [["machine", "decisions", "tests"], pytest.param([], marks=pytest.mark.whole)],
    ids=["some", "all"],
)
def test_the_campaign_end_to_end(tmp_path, names):
    arguments = ["-m", "benchmarks.gpu", "--device", "cpu", "--tiny", "--fresh", *(["--only", *names] if names else [])]
    ran = python(*arguments, cwd=ROOT, path=[ROOT], timeout=1200, OUT=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"cpu.md", "cpu.json"}
    found = json.loads((tmp_path / "cpu.json").read_text())
    measured = {part["name"]: part for part in found["parts"]}
    for name in names or measured:
        assert measured[name]["state"] == "complete" and measured[name]["units"], name
        assert {unit["state"] for unit in measured[name]["units"].values()} <= {"ok", "skipped"}
    for unit in measured["decisions"]["units"].values():
        times = unit["figures"]["times"]["forward"]
        assert times["mindspeed_lite"]["device"] > 0 and not unit["figures"]["errors"]
    text = (tmp_path / "cpu.md").read_text()
    assert text == page.render(found, "cpu.json") and "The sizes are tiny" in text
    assert str(ROOT) not in text and sys.executable not in text


def test_readme_takes_the_trainings_of_a_campaign(tmp_path, monkeypatch, campaign):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import generate

    monkeypatch.setattr(generate, "DOCS", tmp_path)
    assert generate._gpu_results() == []
    folder = tmp_path / "benchmarks" / "gpu"
    folder.mkdir(parents=True)
    one = campaign()
    steps = {"off 1": 0.4, "off 2": 0.42, "on 1": 0.2, "on 2": 0.2, "liger 1": 0.3}
    for name, seconds in steps.items():
        figures = {
            "step_seconds": seconds, "losses": [4.0, 3.0 if name[:2] != "on" else 3.003], "peak_memory_bytes": 60e9,
            "flops_per_step": 1e14, "features": ["f"], "fallbacks": [],
        }  # fmt: skip
        unit = {"state": "ok", "reason": "", "seconds": 1.0, "figures": figures}
        one.records["dense"]["units"][name] = unit
    one.write()
    shutil.copy(one.out / "h100.json", folder)
    about = one.records["dense"]["about"]
    assert generate._gpu_results() == [
        ("H100", f"[dense](docs/benchmarks/gpu/h100.md): {about}", "0.410 s to 0.200 s", "2.05x (2.00, 2.10)",
         "60.00 GB to 60.00 GB", "1e-03 apart"),
    ]  # fmt: skip
    text = (one.out / "h100.md").read_text()
    assert "| liger | 300.0 ms | 1.33x (1.33) |" in text and "| on | 200.0 ms, 200.0 ms | 2.05x (2.00, 2.10) |" in text


def test_losses_that_are_missing_or_not_finite_are_apart_and_a_page_that_fails_ends_nothing(campaign, monkeypatch):
    run = {"step_seconds": 1.0, "peak_memory_bytes": 1, "losses": [4.0, 2.0]}
    assert page.compare([run], [run]).loss_apart == 0.0
    assert page.compare([run], [{**run, "losses": [4.0, 1.0]}]).loss_apart == 0.5
    for wrong in ("nan", "inf", None):
        assert page.compare([run], [{**run, "losses": [4.0, wrong]}]).loss_apart == float("inf")
    monkeypatch.setattr(page, "render", lambda found, data: 1 / 0)
    one = campaign()
    one.write()
    assert "could not be rendered: ZeroDivisionError" in (one.out / "h100.md").read_text()
    assert json.loads((one.out / "h100.json").read_text())["kind"] == "campaign"
