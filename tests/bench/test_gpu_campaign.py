"""The campaign on a GPU, on this machine: its page and JSON end to end, and what becomes of parts that go wrong."""

import json
import os
import re
import signal
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from benchmarks import gpu, gpu_page, gpu_parts
from benchmarks.configurations import CONFIGURATIONS
from benchmarks.run import keep, page_of
from mindspeed_lite.ops.discovery import OPERATORS
from tests.harness.commands import python

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "docs" / "benchmarks" / "cpu"
DESCRIBED = {"device": "1 x NVIDIA H100 80GB HBM3", "device_type": "cuda", "versions": {"torch": "2.11.0"}}


@pytest.fixture(autouse=True)
def handlers():
    """The campaign's handlers of signals do not stay in the process of the tests."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# In place of `mindspeed-lite`: what it does is in the part's command.
STUB = """
import json, pathlib, shutil, sys, time
words = sys.argv[1:]
out = pathlib.Path(words[words.index("--out") + 1])
counted = pathlib.Path(words[1])
counted.write_text(counted.read_text() + words[0] + "\\n" if counted.exists() else words[0] + "\\n")
out.mkdir(parents=True)
def report(complete):
    found = json.loads(pathlib.Path(words[2]).read_text())
    for row in found.get("rows", ()):
        row["ceiling_per_second"] = 3e12
    (out / "report.json").write_text(json.dumps(found | {"complete": complete}))
if words[0] == "works":
    report(True)
elif words[0] == "breaks":
    sys.exit("out of luck")
else:
    try:
        print("running", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        if words[0] == "deaf":
            time.sleep(60)
        report(False)
"""


# Long enough for a stub to begin.
BEGUN = 6.0


@pytest.fixture
def campaign(tmp_path, monkeypatch):
    """`campaign()` is one with a minute left, whose parts are stubs."""
    stub = tmp_path / "stub.py"
    stub.write_text(STUB)
    monkeypatch.setattr(gpu, "COMMAND", (sys.executable, str(stub)))
    monkeypatch.setattr(gpu, "LEAST_SECONDS", 0.2)
    monkeypatch.setattr(gpu, "GRACE_SECONDS", 60.0)

    def made(seconds=60.0, fresh=False, described=DESCRIBED):
        made = gpu.Campaign(tmp_path / "kept", dict(os.environ), described, seconds, fresh)
        made.clock = lambda: 0.0  # what the tests themselves take does not count
        return made

    return made


def part(tmp_path, what, seconds=30.0, report="operators", name="part"):
    cases = ("rms_norm 4x4 bf16", "rms_norm 5x5 bf16") if report == "operators" else ()
    source = KEPT / report / "report.json"
    return gpu_parts.Part(name, "about", seconds, (what, str(tmp_path / "calls"), str(source)), cases=cases)


def calls(tmp_path):
    return (tmp_path / "calls").read_text().split()


def test_a_finished_part_is_not_measured_again(campaign, tmp_path):
    works = part(tmp_path, "works")
    campaign().run([works])
    assert campaign().record(works)["state"] == "complete" and campaign().record(works)["report"]["rows"]
    campaign().run([works])
    assert calls(tmp_path) == ["works"]
    campaign(fresh=True).run([works])
    assert calls(tmp_path) == ["works"] * 2
    # Other versions, or another command, are another measurement.
    changed = campaign(described={**DESCRIBED, "versions": {"torch": "2.12"}})
    assert changed.record(works)["state"] == "not started"
    assert campaign().record(part(tmp_path, "breaks"))["state"] == "not started"


def test_a_part_is_stopped_at_its_limit_and_says_what_is_left_out(campaign, tmp_path):
    slow = part(tmp_path, "slow", seconds=0.1)
    campaign(seconds=BEGUN).run([slow])
    record = campaign().record(slow)
    assert record["state"] == "stopped" and record["reason"] == "stopped at its limit"
    assert record["left_out"] == list(slow.cases) and record["report"]["rows"]
    # The next run begins it again.
    campaign(seconds=BEGUN).run([slow])
    assert calls(tmp_path) == ["slow"] * 2


def test_a_part_that_does_not_end_is_killed_and_one_that_breaks_is_failed(campaign, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "GRACE_SECONDS", 1.0)
    deaf, broken = part(tmp_path, "deaf", name="deaf"), part(tmp_path, "breaks", name="broken", report="long")
    campaign(seconds=BEGUN).run([deaf])
    campaign().run([broken])
    record = campaign().record(deaf)
    assert record["state"] == "stopped" and record["report"] is None and "without a report: running" in record["reason"]
    record = campaign().record(broken)
    assert record["state"] == "failed" and "out of luck" in record["reason"]
    assert record["left_out"] == ["the whole training"] and gpu._has_failed(record)


def test_what_a_part_leaves_is_the_next_ones_and_no_part_starts_too_late(campaign, tmp_path, monkeypatch):
    first, second = part(tmp_path, "works", 30, name="first"), part(tmp_path, "works", 20, name="second")
    limits = []
    monkeypatch.setattr(gpu.Campaign, "_measure", lambda self, part, limit: limits.append((part.name, round(limit))))
    campaign(seconds=60).run([first, second])
    campaign(seconds=40).run([first, second])
    campaign(seconds=10).run([first, second])
    assert limits == [("first", 40), ("second", 60), ("first", 30), ("second", 40), ("first", 10), ("second", 10)]
    late = campaign(seconds=0.1)
    late.run([first])
    assert late.record(first)["state"] == "not started" and "used up" in late.record(first)["reason"]


def test_packages_that_are_missing(campaign, tmp_path, monkeypatch):
    find = gpu.importlib.util.find_spec
    monkeypatch.setattr(
        gpu.importlib.util, "find_spec", lambda name: None if name in ("matplotlib", "liger_kernel") else find(name)
    )
    training = gpu_parts.parts("cuda", False)[-1]
    notes = gpu.missing_notes(gpu_parts.parts("cuda", False))
    assert "pip install 'mindspeed-lite[compare]'" in notes[0]
    assert notes[1:] == [f"{name} is skipped: not installed: matplotlib" for name in ("dense", "moe", "long")]
    campaign().run([training])
    assert campaign().record(training)["state"] == "skipped"


def test_parts_of_the_campaign():
    parts = gpu_parts.parts("cuda", False)
    measured = {case.split()[0] for part in parts for case in part.cases}
    assert measured == set(OPERATORS)
    # Together they leave room for the start and the last one's farewell.
    assert sum(part.seconds for part in parts) <= 18.5 * 60
    assert [part.name for part in parts if part.program] == [each.name for each in CONFIGURATIONS["gpu"]]
    assert {part.name for part in gpu_parts.parts("cpu", True)} <= {part.name for part in parts}


def test_the_page_has_every_part(campaign, tmp_path):
    works, training, deaf = (
        part(tmp_path, "works", name="operators"),
        part(tmp_path, "works", name="dense", report="dense-medium"),
        part(tmp_path, "breaks", name="long", report="long"),
    )
    running = campaign()
    running.run([works, training, deaf])
    found = {
        "created": "now", "tiny": False, "environment": DESCRIBED, "notes": ["no peer"],
        "parts": [running.record(each) for each in (works, training, deaf)],
    }  # fmt: skip
    row = found["parts"][0]["report"]["rows"][0]
    row["contenders"][1].update(seconds=None, error="does not agree with ours: output differs by 0.5, allowed 0.03")
    page = gpu_page.render(found, "h100.json")
    assert (
        page.startswith("# Operators and trainings on 1 x NVIDIA H100 80GB HBM3\n") and "[h100.json](h100.json)" in page
    )
    assert "does not agree with ours: output differs by 0.5" in page and "3.00 TB/s" in page and "- no peer" in page
    assert "| long | failed: ended without a report: out of luck |" in page
    line = next(line for line in page.splitlines() if line.startswith("| dense | ") and "agrees" in line)
    assert re.search(r"\| \d\.\d\d \(\d\.\d\d to \d\.\d\d\) \|", line)
    tables = [line for line in page.splitlines() if line.startswith("|")]
    widths = {len(line.split(" | ")) for line in tables if line.startswith(f"| {row['operator']} ")}
    assert len(widths) == 1


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("1 x NVIDIA H100 80GB HBM3", "h100"),
        ("8 x NVIDIA A100-SXM4-80GB", "a100"),
        ("1 x NVIDIA L40S", "l40s"),
        ("1 x NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090"),
    ],
)
def test_the_page_is_called_as_the_device(device, name):
    assert gpu.page_name(device, "cuda") == name and gpu.page_name(device, "cpu") == "cpu"


def test_wheels_are_unpacked_once(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "SCRATCH", tmp_path / "scratch")
    with pytest.raises(gpu.CampaignError, match=r"--wheels: no \*.whl"):
        gpu.unpack(tmp_path)
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("thing/__init__.py", "answer = 42")
        archive.writestr("thing-1.0.data/purelib/other.py", "")
    found = gpu.unpack(tmp_path)
    assert (found[0] / "thing" / "__init__.py").is_file() and (found[1] / "other.py").is_file()
    marked = found[0] / "marked"
    marked.write_text("")
    assert gpu.unpack(tmp_path) == found and marked.exists()
    (tmp_path / "broken-1.0-py3-none-any.whl").write_text("no zip")
    with pytest.raises(gpu.CampaignError, match=r"cannot unpack broken-1.0"):
        gpu.unpack(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cpu"], ["--device cpu", "--tiny"]),
        (["--tiny", "--minutes", "0"], ["--minutes", "above 0"]),
        (["--tiny", "--only", "tense"], ["--only", "tense", "dense"]),
        (["--tiny", "--wheels", "/nowhere"], ["--wheels", "/nowhere"]),
    ],
)
def test_bad_input_is_one_line(arguments, words, capsys):
    assert gpu.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(word in said for word in words), said


def test_the_page_of_the_cpu_is_what_its_reports_say():
    assert page_of(CONFIGURATIONS["cpu"], KEPT) == KEPT.with_suffix(".md").read_text(encoding="utf-8")


@pytest.mark.parametrize("complete", [True, False, None])
def test_a_run_that_ended_early_replaces_no_report(tmp_path, complete):
    scratch, kept = tmp_path / "scratch", tmp_path / "kept"
    for folder, text in ((scratch, "new"), (kept, "old")):
        folder.mkdir()
        (folder / "report.md").write_text(text)
    if complete is not None:
        (scratch / "report.json").write_text(json.dumps({"complete": complete}))
    keep(scratch, kept)
    assert (kept / "report.md").read_text() == ("new" if complete else "old")


@pytest.mark.parametrize(
    "names", [["operators-layers"], pytest.param(["dense", "moe", "long"], marks=pytest.mark.whole)], ids=" ".join
)
def test_the_campaign_end_to_end(tmp_path, names):
    arguments = ["-m", "benchmarks.gpu", "--device", "cpu", "--tiny", "--out", tmp_path, "--fresh", "--only", *names]
    ran = python(*arguments, cwd=ROOT, path=[ROOT], timeout=1200)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"cpu.md", "cpu.json"}
    found = json.loads((tmp_path / "cpu.json").read_text())
    parts = {part["name"]: part for part in found["parts"]}
    assert set(parts) == {"operators-layers", "dense", "moe", "long"}
    for name in names:
        assert parts[name]["state"] == "complete" and parts[name]["left_out"] == []
        report = parts[name]["report"]
        for row in report.get("rows", ()):
            assert row["ceiling_per_second"] > 0 and all(each["of_ceiling"] > 0 for each in row["contenders"])
        for compared in report.get("comparisons", ()):
            assert compared["speed"]["ratio"] > 0
        assert report.get("rows") or report.get("comparisons")
    page = (tmp_path / "cpu.md").read_text()
    assert page == gpu_page.render(found, "cpu.json") and "The sizes are tiny" in page
    assert str(ROOT) not in page and sys.executable not in page


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_campaign_keeps_what_it_has_and_writes_its_page(campaign, tmp_path, monkeypatch, capsys, sign):
    parts = [part(tmp_path, what, name=what) for what in ("works", "slow", "breaks")]
    monkeypatch.setattr(gpu, "parts", lambda device, tiny: parts)
    monkeypatch.setattr(gpu, "_describe", lambda device, environment: DESCRIBED)
    monkeypatch.setattr(gpu, "SCRATCH", tmp_path / "scratch")

    def interrupt() -> None:
        while not any("running" in log.read_text() for log in (tmp_path / "scratch").rglob("slow/log.txt")):
            time.sleep(0.05)
        os.kill(os.getpid(), sign)

    before = list(sys.path)
    threading.Thread(target=interrupt).start()
    assert gpu.main(["--out", str(tmp_path / "page")]) == 130
    sys.path[:] = before
    found = json.loads((tmp_path / "page" / "h100.json").read_text())
    assert [each["state"] for each in found["parts"]] == ["complete", "stopped", "not started"]
    assert found["parts"][1]["reason"] == "interrupted" and found["parts"][1]["report"]["rows"]
    page = (tmp_path / "page" / "h100.md").read_text()
    assert "| slow | stopped: interrupted |" in page and "| breaks | not started: not asked for yet |" in page
    # The same command goes on: what is complete stays, and a part that breaks is an exit code.
    parts[1] = part(tmp_path, "works", name="slow")
    assert gpu.main(["--out", str(tmp_path / "page")]) == 1
    sys.path[:] = before
    assert calls(tmp_path) == ["works", "slow", "works", "breaks"]
    assert "finished in an earlier run" in capsys.readouterr().out
