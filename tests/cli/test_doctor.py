"""`mindspeed-lite doctor`: every absence is a row with a remedy, none is a traceback."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap

import pytest

from mindspeed_lite import cli
from mindspeed_lite.cli import checks
from mindspeed_lite.cli.checks import build, devices, environment, features, megatron, packages
from tests.harness import fake_torch_npu, matrix
from tests.harness.commands import command, without

STATUSES = {"ok", "note", "problem"}


def examined(run):
    """The rows of `doctor --json` by check, after what holds for every report."""
    assert run.stderr == ""
    document = json.loads(run.stdout)
    problems = [row for row in document["rows"] if row["status"] == "problem"]
    assert document["schema_version"] == 1
    assert document["ready"] == (not problems)
    assert run.returncode == (1 if problems else 0)
    assert all(row["status"] in STATUSES and row["text"] for row in document["rows"])
    assert all(row["fix"] for row in problems), problems
    assert not [row for row in document["rows"] if "cannot be examined" in row["text"]]
    by_check = {}
    for row in document["rows"]:
        by_check.setdefault(row["check"], []).append(row)
    return by_check


@pytest.fixture
def fresh():
    """Checks that remember nothing, before and after."""
    checks.found.forget()
    yield
    checks.found.forget()


@pytest.fixture
def fake_host(tmp_path, monkeypatch, fresh):
    """`fake_host(version)` puts a Megatron of that version, with a training folder, first on the path."""

    def make(version, training=True, makefile=True, built=True):
        core = tmp_path / "megatron" / "core"
        (core / "datasets").mkdir(parents=True)
        (core / "__init__.py").write_text("raise RuntimeError('doctor imports no Megatron')")
        (core / "package_info.py").write_text(f"__version__ = {version!r}")
        if makefile:
            (core / "datasets" / "Makefile").write_text("")
        if built:
            suffix = sysconfig.get_config_var("EXT_SUFFIX")
            (core / "datasets" / f"helpers_cpp{suffix}").write_text("")
        if training:
            (tmp_path / "megatron" / "training").mkdir()
            (tmp_path / "megatron" / "training" / "__init__.py").write_text("")
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, find=importlib.util.find_spec: (
                type("Spec", (), {"submodule_search_locations": [str(tmp_path / "megatron")]})
                if name == "megatron"
                else find(name)
            ),
        )
        return core

    return make


def test_here_it_says_something_about_everything(capsys, fresh):
    code = cli.main(["doctor", "--json"])
    captured = capsys.readouterr()
    found = examined(subprocess.CompletedProcess([], code, captured.out, captured.err))
    asked = {"python", "torch", "megatron-core", "device", "collectives", "allocator", "features"}
    assert asked <= set(found)
    assert found["torch"][0]["status"] == "ok"


def test_text_and_json_say_the_same(capsys, monkeypatch):
    rows = [checks.row.ok("one", "fine"), checks.row.problem("two", "bad", "mend it")]
    monkeypatch.setattr("mindspeed_lite.cli.doctor.examine", lambda: rows)
    assert cli.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "fine" in text and "-> mend it" in text and "1 problem:" in text
    assert cli.main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["rows"][1] == {
        "check": "two",
        "status": "problem",
        "text": "bad",
        "fix": "mend it",
    }


def test_without_torch(tmp_path):
    found = examined(command("doctor", "--json", **without(tmp_path, "torch")))
    assert found["torch"][0]["status"] == "problem" and "pip install" in found["torch"][0]["fix"]
    assert found["device"][0]["status"] == found["features"][0]["status"] == "note"


def test_without_megatron(tmp_path):
    found = examined(command("doctor", "--json", **without(tmp_path, "megatron")))
    assert found["megatron-core"][0]["status"] == "problem"
    assert "checkout" in found["megatron-core"][0]["fix"]
    assert "megatron.training" not in found


def test_without_anything(tmp_path):
    gone = ("torch", "megatron", "pybind11", *packages.OURS, *packages.TRAINING)
    found = examined(command("doctor", "--json", **without(tmp_path, *gone), PATH=""))
    assert "pyyaml" in found["script's packages"][0]["fix"]
    assert "wrapt" in found["own packages"][0]["fix"]
    assert found["c++ compiler"][0]["status"] == "note"


def fake_torch(folder, body=""):
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(body)


def test_a_torch_that_does_not_import(tmp_path):
    fake_torch(tmp_path, "raise RuntimeError('Failed to load the backend extension: torch_npu')")
    found = examined(command("doctor", "--json", path=[tmp_path]))
    row = found["torch"][0]
    assert row["status"] == "problem" and "backend extension" in row["text"] and "AUTOLOAD" in row["fix"]


@matrix.whole
def test_a_torch_npu_that_breaks_in_its_own_way(tmp_path):
    fake_torch_npu.torch_npu(tmp_path, "raise AttributeError('no _npu here')")
    found = examined(command("doctor", "--json", path=[tmp_path]))
    assert "no _npu here" in found["device"][0]["text"]
    pair = found["torch_npu"][0]
    assert pair["status"] == "note" and "no _npu here" in pair["text"] and "reinstall torch_npu" in pair["fix"]


@pytest.mark.parametrize(
    ("version", "status", "text"),
    [
        ("0.19.2", "ok", "verified releases"),
        ("0.19.99", "ok", "verified series"),
        ("99.0", "note", "not verified"),
        ("0.9.0", "problem", "older than the supported"),
    ],
)
def test_the_version_of_megatron(fake_host, version, status, text):
    fake_host(version)
    row = megatron.check_megatron()[0]
    assert row.status == status and text in row.text


def test_megatron_without_its_training(fake_host):
    fake_host("0.16.1", training=False)
    row = megatron.check_megatron()[1]
    assert row.status == "note" and "0.16 wheels" in row.text


def test_two_megatrons_are_a_problem(fake_host, tmp_path, monkeypatch):
    core = fake_host("0.19.2", training=False)
    other = tmp_path / "other" / "megatron" / "training"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    folders = [str(core.parent), str(other.parent)]
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: type("Spec", (), {"submodule_search_locations": folders}),
    )
    row = megatron.check_megatron()[1]
    assert row.status == "problem" and "mixed" in row.text


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
def test_the_dataset_helper(fake_host, monkeypatch, makefile, built, tools, suffix, status):
    fake_host("0.19.2", makefile=makefile, built=built)
    own = sysconfig.get_config_var("EXT_SUFFIX")
    monkeypatch.setattr(build, "_suffix_of_python3_config", lambda: own if suffix == "same" else suffix)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if tools else None)
    monkeypatch.setattr(checks.found, "is_there", lambda module: True)
    monkeypatch.delenv("CXX", raising=False)
    row = build.check_build_tools()[-1]
    assert (row.check, row.status) == ("dataset helper", status), row


def test_a_target_that_drifted_is_a_reason(fake_host):
    core = fake_host("0.19.2")
    (core / "transformer").mkdir()
    (core / "transformer" / "__init__.py").write_text("")
    (core / "transformer" / "torch_norm.py").write_text(
        textwrap.dedent(
            """
            class WrappedTorchNorm:
                def __new__(cls, config, something_new):
                    return None
            """
        )
    )
    texts = {row.check: row.text for row in features.check_features()}
    assert "unlike the verified releases" in texts["feature use_fused_rmsnorm"]
    assert "is not found" in texts["feature use_flash_attn"]


def test_variables_in_force(monkeypatch):
    for name in [each for each in os.environ if each.startswith("MINDSPEED_LITE_")]:
        monkeypatch.delenv(name)
    assert [row.status for row in environment.check_environment()] == ["ok"]
    monkeypatch.setenv("MINDSPEED_LITE_DISABLE", "1")
    monkeypatch.setenv("MINDSPEED_LITE_DEVISE", "cpu")
    rows = environment.check_environment()
    assert [row.status for row in rows] == ["note", "note"]
    assert rows[0].fix == "did you mean MINDSPEED_LITE_DEVICE?"


@pytest.mark.parametrize(
    ("asked", "status", "text"),
    [("cpu", "ok", "by MINDSPEED_LITE_DEVICE"), ("tpu", "problem", "not a device")],
)
def test_the_device(monkeypatch, fresh, asked, status, text):
    monkeypatch.setenv("MINDSPEED_LITE_DEVICE", asked)
    row = devices.check_device()[0]
    assert row.status == status and text in row.text
    assert all(f"{name}:" in row.text for name in ("npu", "cuda", "cpu"))


@pytest.mark.parametrize(("value", "status"), [("keep", "ok"), ("system", "ok"), ("fast", "problem")])
def test_the_allocator(monkeypatch, fresh, value, status):
    monkeypatch.setenv("MINDSPEED_LITE_ALLOCATOR", value)
    monkeypatch.setenv("MINDSPEED_LITE_DEVICE", "cpu")
    row = devices.check_allocator()[0]
    assert row.status == status or (value == "keep" and row.status == "note")


def test_a_check_that_fails_is_a_row(monkeypatch):
    def broken():
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr(checks, "CHECKS", {"broken": broken, "python": packages.check_python})
    first, second = checks.examine()
    assert first.status == "problem" and "of all things" in first.text
    assert second.check == "python" and sys.executable in second.text
