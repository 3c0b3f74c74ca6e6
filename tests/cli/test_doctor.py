"""`mindspeed-lite doctor`: every absence is a row with a remedy, none is a traceback."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig

import pytest

from mindspeed_lite import cli
from mindspeed_lite.cli import doctor_checks
from mindspeed_lite.cli.doctor_checks import CHECKS, Machine, Row
from tests.harness.commands import command, without


def examined(run):
    """The rows of `doctor --json` by check, after what holds for every report."""
    assert run.stderr == ""
    document = json.loads(run.stdout)
    problems = [row for row in document["rows"] if row["status"] == "problem"]
    assert document["schema_version"] == 1 and document["ready"] == (not problems)
    assert run.returncode == (1 if problems else 0)
    assert all(row["status"] in ("ok", "note", "problem") and row["text"] for row in document["rows"])
    assert all(row["fix"] for row in problems), problems
    assert not [row for row in document["rows"] if "cannot be examined" in row["text"]]
    return {row["check"]: row for row in reversed(document["rows"])}


def rows(check):
    return list(CHECKS[check](Machine()))


@pytest.fixture
def fake_megatron(tmp_path, monkeypatch):
    """`fake_megatron(version)` puts a Megatron of that version, with a training folder, first on the path."""

    def make(version, training=True, makefile=True, built=True):
        folders = [tmp_path / "megatron", tmp_path / "other"]
        core = folders[0] / "core"
        (core / "datasets").mkdir(parents=True)
        (core / "__init__.py").write_text("raise RuntimeError('doctor imports no Megatron')")
        (core / "package_info.py").write_text(f"__version__ = {version!r}")
        if makefile:
            (core / "datasets" / "Makefile").write_text("")
        if built:
            (core / "datasets" / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}").write_text("")
        if training:
            (folders[training == "elsewhere"] / "training").mkdir(parents=True)
            (folders[training == "elsewhere"] / "training" / "__init__.py").write_text("")
        spec, find = type("Spec", (), {"submodule_search_locations": folders}), importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "megatron" else find(name))
        return core

    return make


def test_here_it_says_something_about_everything(capsys):
    code = cli.main(["doctor", "--json"])
    captured = capsys.readouterr()
    found = examined(subprocess.CompletedProcess([], code, captured.out, captured.err))
    assert {"python", "torch", "megatron-core", "device", "collectives", "allocator", "features"} <= set(found)
    assert found["torch"]["status"] == "ok"


def test_text_and_json_say_the_same_and_a_check_that_fails_is_a_row(capsys, monkeypatch):
    def broken(machine):
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr(doctor_checks, "CHECKS", {"broken": broken, "python": CHECKS["python"]})
    first, second = found = doctor_checks.examine(Machine())
    assert first == Row("broken", "problem", "cannot be examined: ZeroDivisionError: of all things", first.fix)
    assert second.check == "python" and sys.executable in second.text
    assert cli.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert f"{first.text} -> {first.fix}" in text and second.text in text and "1 problem:" in text
    assert cli.main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["rows"] == [row._asdict() for row in found]


def test_without_torch_and_without_anything(tmp_path):
    gone = without(tmp_path, "torch", "megatron", "pybind11", *doctor_checks.OWN_PACKAGES)
    found = examined(command("doctor", "--json", **gone, PATH=""))
    assert found["torch"]["status"] == "problem" and "pip install" in found["torch"]["fix"]
    assert found["device"]["status"] == found["features"]["status"] == "note"
    assert found["megatron-core"]["status"] == "problem" and "checkout" in found["megatron-core"]["fix"]
    assert "megatron.training" not in found
    assert "wrapt" in found["own packages"]["fix"] and "script's packages" not in found
    assert found["c++ compiler"]["status"] == "note"


def test_a_command_is_judged_by_what_it_would_import(tmp_path):
    for name, text in {
        "megatron/core/__init__.py": "import yaml\nfrom . import inner\n\ndef f(): import never_at_the_start",
        "megatron/core/inner.py": "try:\n    import optional_extension\nexcept ImportError:\n    pass",
        "megatron/core/package_info.py": "__version__ = '0.16.1'",
        "megatron/core/datasets/Makefile": "",
        "megatron/training/__init__.py": "from megatron.training.loop import train",
        "megatron/training/loop.py": "import no_such_tokenizer",
        "job/helper.py": "import no_such_reader, torch",
        "job/train.py": "import helper\nfrom megatron.training import train\nfrom megatron import core",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    run = command("doctor", "--json", "--", sys.executable, "train.py", cwd=tmp_path / "job", path=[tmp_path])
    found = examined(run)
    assert f"{sys.executable} runs {tmp_path}/job/train.py" in run.stdout
    assert "does not import mindspeed_lite" in run.stdout
    assert found["megatron-core"]["text"].startswith(f"0.16.1 at {tmp_path}/megatron/core")
    row = found["script's packages"]
    assert row["fix"] == "pip install no_such_tokenizer no_such_reader"
    assert f"no_such_reader (by {tmp_path}/job/helper.py)" in row["text"]
    assert found["dataset helper"]["status"] != "ok" or "first start" in found["dataset helper"]["text"]


def test_a_torch_that_does_not_import(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('Failed to load the backend: torch_npu')")
    row = examined(command("doctor", "--json", path=[tmp_path]))["torch"]
    assert row["status"] == "problem" and "the backend" in row["text"] and "AUTOLOAD" in row["fix"]


@pytest.mark.parametrize(
    ("check", "version", "training", "status", "text"),
    [
        ("megatron-core", "0.19.2", True, "ok", "verified releases"),
        ("megatron-core", "0.19.99", True, "ok", "verified series"),
        ("megatron-core", "99.0", True, "note", "not verified"),
        ("megatron-core", "0.9.0", True, "problem", "older than supported"),
        ("megatron.training", "0.19.2", True, "ok", "there"),
        ("megatron.training", "0.16.1", False, "note", "0.16 wheels"),
        ("megatron.training", "0.19.2", "elsewhere", "problem", "mixed"),
    ],
)
def test_the_megatron_that_is_there(fake_megatron, check, version, training, status, text):
    fake_megatron(version, training=training)
    ((found, shown, *_),) = rows(check)
    assert found == status and text in shown


@pytest.mark.parametrize(
    ("makefile", "built", "tools", "suffix", "status"),
    [
        (True, True, True, "", "ok"),
        (True, False, True, "same", "ok"),
        (True, False, True, ".cpython-39-x.so", "problem"),
        (True, False, False, "same", "problem"),
        (True, True, False, "same", "problem"),
        (False, True, True, "same", "ok"),
    ],
)
def test_the_dataset_helper(fake_megatron, monkeypatch, makefile, built, tools, suffix, status):
    fake_megatron("0.19.2", makefile=makefile, built=built)
    own = sysconfig.get_config_var("EXT_SUFFIX")
    monkeypatch.setattr(doctor_checks, "suffix_of_python3_config", lambda: own if suffix == "same" else suffix)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if tools else None)
    monkeypatch.setattr(doctor_checks, "is_there", lambda module: True)
    monkeypatch.delenv("CXX", raising=False)
    assert rows("dataset helper")[0][0] == status


def test_a_target_that_drifted_is_a_reason(fake_megatron):
    core = fake_megatron("0.19.2")
    (core / "transformer").mkdir()
    (core / "transformer" / "__init__.py").write_text("")
    (core / "transformer" / "torch_norm.py").write_text(
        "class WrappedTorchNorm:\n    def __new__(cls, config, something_new):\n        return None\n"
    )
    texts = {text.partition(" ")[0]: text for _, text, *_ in rows("features")}
    assert "unlike the verified releases" in texts["use_fused_rmsnorm"]
    assert "is not in the source of its module" in texts["use_flash_attn"]


@pytest.mark.parametrize(
    ("check", "name", "value", "statuses", "text"),
    [
        ("device", "MINDSPEED_LITE_DEVICE", "cpu", {"ok"}, "by MINDSPEED_LITE_DEVICE"),
        ("device", "MINDSPEED_LITE_DEVICE", "tpu", {"problem"}, "not a device"),
        ("allocator", "MINDSPEED_LITE_ALLOCATOR", "keep", {"ok", "note"}, "freed memory"),
        ("allocator", "MINDSPEED_LITE_ALLOCATOR", "system", {"ok"}, "system"),
        ("allocator", "MINDSPEED_LITE_ALLOCATOR", "fast", {"problem"}, "fast"),
        ("cpu binding", "MINDSPEED_LITE_BIND", "auto", {"ok"}, "binds rank 0 to CPUs "),
        ("cpu binding", "MINDSPEED_LITE_BIND", "none", {"ok"}, "off; MINDSPEED_LITE_BIND=auto would bind rank 0 to"),
        ("cpu binding", "MINDSPEED_LITE_BIND", "yes", {"problem"}, "choose none or auto"),
        ("environment", "MINDSPEED_LITE_DISABLE", "1", {"note"}, "MINDSPEED_LITE_DISABLE=1: off"),
        ("environment", "MINDSPEED_LITE_DEVISE", "cpu", {"note"}, "did you mean MINDSPEED_LITE_DEVICE?"),
        ("environment", "NONE_OF_OURS", "1", {"ok"}, "no MINDSPEED_LITE_ variable"),
    ],
)
def test_what_a_variable_chooses(monkeypatch, check, name, value, statuses, text):
    for each in [each for each in os.environ if each.startswith("MINDSPEED_LITE_")]:
        monkeypatch.delenv(each)
    if check == "allocator":
        monkeypatch.setenv("MINDSPEED_LITE_DEVICE", "cpu")
    monkeypatch.setenv(name, value)
    ((status, *shown),) = rows(check)
    assert status in statuses and text in " ".join(shown)
    if check == "device":
        assert all(f"{each}:" in shown[0] for each in ("npu", "cuda", "cpu"))
