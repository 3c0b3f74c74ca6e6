"""`mindspeed-lite doctor` where torch_npu is installed: what is wrong and what to do, whatever torch_npu does."""

from __future__ import annotations

import json
import time

import pytest

from mindspeed_lite.platform import npu
from tests.harness import fake_torch_npu, matrix
from tests.harness.commands import command, fails_in_one_line

# Nothing of CANN's in the environment, whatever this machine has.
BARE = {"ASCEND_HOME_PATH": "", "ASCEND_RT_VISIBLE_DEVICES": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}


def rows(run):
    """The rows of `doctor --json` by check; nothing on stderr, and no check that broke."""
    assert run.stderr == "", run.stderr
    document = json.loads(run.stdout)
    assert run.returncode == (0 if document["ready"] else 1)
    assert not [row for row in document["rows"] if "cannot be examined" in row["text"]]
    return {row["check"]: row for row in document["rows"]}


def examined(folder, *options, **variables):
    return rows(command("doctor", "--json", *options, path=[folder], **{**BARE, **variables}))


@matrix.whole
def test_a_missing_library_names_it_and_the_script_to_source(tmp_path):
    fake_torch_npu.torch_npu(tmp_path, fake_torch_npu.NO_LIBRARY.format(library="libhccl.so"))
    found = examined(tmp_path, MINDSPEED_LITE_DEVICE="npu")
    row = found["torch_npu"]
    assert row["status"] == "note" and fake_torch_npu.MATCHING in row["text"]
    assert "CANN's libhccl.so is not found and ASCEND_HOME_PATH is not set" in row["text"]
    assert "set_env.sh" in row["fix"]
    assert found["torch"]["status"] == "ok", "torch itself is fine without the extension"
    device = found["device"]
    assert device["status"] == "problem" and "libhccl.so" in device["text"] and "set_env.sh" in device["text"]


@matrix.whole
def test_torch_that_loads_it_fails_with_it(tmp_path):
    fake_torch_npu.torch_npu(tmp_path, fake_torch_npu.NO_LIBRARY.format(library="libascendcl.so"), autoload=True)
    found = examined(tmp_path)
    row = found["torch"]
    assert row["status"] == "problem" and "`import torch` fails, for it loads torch_npu" in row["text"]
    assert "libascendcl.so" in row["text"], "the cause, which torch's own message leaves out"
    assert "set_env.sh" in row["fix"] and "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in row["fix"]
    assert found["device"]["status"] == "ok" and found["device"]["text"].startswith("c")


@matrix.whole
@pytest.mark.parametrize("installed", [True, False])
def test_one_for_another_torch(tmp_path, installed):
    fake_torch_npu.torch_npu(tmp_path, fake_torch_npu.ABORTS, version="2.1.0.post8", installed=installed)
    found = examined(tmp_path, MINDSPEED_LITE_DEVICE="npu")
    row = found["torch_npu"]
    assert (
        row["status"] == "problem" and f"torch_npu 2.1.0.post8 is not for torch {fake_torch_npu.TORCH}" in row["text"]
    )
    major, minor = fake_torch_npu.TORCH.split(".")[:2]
    assert f"pip install 'torch-npu=={major}.{minor}.*'" in row["fix"]
    assert row["text"] in found["device"]["text"] and row["fix"] in found["device"]["text"]


@matrix.whole
def test_no_device(tmp_path):
    fake_torch_npu.torch_npu(tmp_path, fake_torch_npu.NO_DEVICE)
    found = examined(tmp_path)
    row = found["torch_npu"]
    assert row["status"] == "note" and "torch_npu finds no NPU device" in row["text"] and "npu-smi" in row["fix"]
    assert found["device"]["status"] == "ok", "training can start without it"
    assert row["fix"] in found["device"]["text"]


@matrix.whole
def test_a_device_that_cannot_be_opened(tmp_path):
    fake_torch_npu.torch_npu(tmp_path, fake_torch_npu.BUSY)
    row = examined(tmp_path)["torch_npu"]
    assert row["status"] == "note" and "cannot be opened: ZeroDivisionError" in row["text"] and "npu-smi" in row["fix"]


@matrix.whole
def test_one_that_ends_the_process(tmp_path):
    fake_torch_npu.torch_npu(tmp_path, fake_torch_npu.ABORTS)
    found = examined(tmp_path)
    row = found["torch_npu"]
    assert row["status"] == "note" and "importing torch_npu" in row["text"]
    assert "ends the process (SIGABRT): the runtime is not pleased" in row["text"] and "matching set" in row["fix"]
    assert found["device"]["status"] == "ok"


@matrix.whole
def test_one_that_hangs(tmp_path):
    fake_torch_npu.torch_npu(tmp_path, fake_torch_npu.HANGS)
    start = time.monotonic()
    row = examined(tmp_path, "--timeout", "6")["torch_npu"]
    assert time.monotonic() - start < 500
    assert row["status"] == "note" and "importing torch" in row["text"]
    assert "does not end (given up after 6 s)" in row["text"] and "--timeout" in row["fix"]


def test_everything_there(tmp_path):
    fake_torch_npu.torch_npu(tmp_path, fake_torch_npu.WORKS)
    home = tmp_path / "cann"
    (home / "x86_64-linux").mkdir(parents=True)
    (home / "x86_64-linux" / "ascend_toolkit_install.info").write_text("package_name=Ascend\nversion=8.5.0\n")
    found = examined(tmp_path, ASCEND_HOME_PATH=str(home))
    row = found["torch_npu"]
    assert row["status"] == "ok", row
    for part in (fake_torch_npu.MATCHING, "CANN 8.5.0", "2 x Ascend910B2", "transfer_to_npu imports", "HCCL there"):
        assert part in row["text"]
    assert found["device"]["text"].startswith("npu (2 x Ascend910B2), chosen by availability. npu: usable")
    assert "hccl there; hccl serves the npu device" in found["collectives"]["text"]
    assert "attention:npu" in found["features"]["text"] and "rms_norm:npu" in found["features"]["text"]


@matrix.whole
def test_without_its_mapping_training_cannot_start(tmp_path):
    fake_torch_npu.torch_npu(tmp_path, fake_torch_npu.WORKS, transfer="raise ImportError('no such name')")
    row = examined(tmp_path)["torch_npu"]
    assert row["status"] == "problem" and "transfer_to_npu does not import: ImportError: no such name" in row["text"]


def test_a_selftest_without_an_npu_says_why_in_the_same_words(tmp_path, monkeypatch):
    fake_torch_npu.torch_npu(tmp_path, fake_torch_npu.NO_LIBRARY.format(library="libhccl.so"))
    run = command("doctor", "--npu-selftest", path=[tmp_path], cwd=tmp_path, **BARE)
    monkeypatch.syspath_prepend(tmp_path)
    for name, value in BARE.items():
        monkeypatch.setenv(name, value)
    fails_in_one_line(run, "--npu-selftest", str(npu.trouble()))
    assert not (tmp_path / "selftest.json").exists()


@matrix.whole
def test_a_selftest_on_an_npu_that_computes_nothing_fails_and_reports(tmp_path):
    fake_torch_npu.torch_npu(tmp_path, fake_torch_npu.WORKS)
    out = tmp_path / "report.json"
    run = command("doctor", "--npu-selftest", "--quick", "--out", out, path=[tmp_path], **BARE)
    assert run.returncode == 1, run.stderr
    report = json.loads(out.read_text())
    assert report["device"] == "npu" and report["facts"]["name"] == "Ascend910B2" and not report["passed"]
    names = {check["name"] for check in report["checks"]}
    assert {"device layer", "streams and events", "random state", "memory statistics"} <= names
    assert "process group (hccl)" in names
    failed = [check["name"] for check in report["checks"] if check["status"] == "failed"]
    assert set(failed) == {name for name in names if not name.endswith(", backend")}
    assert f"To report, with {out}:" in run.stdout and run.stdout.count("on npu: failed:") == len(failed)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--quick",), "belongs to --selftest"),
        (("--out", "x"), "belongs to --selftest"),
        (("--selftest", "--npu-selftest"), "not allowed with"),
        (("--timeout", "soon"), "invalid number of seconds"),
        (("--timeout", "0"), "invalid number of seconds"),
    ],
)
def test_bad_options_are_one_line(arguments, word):
    fails_in_one_line(command("doctor", *arguments), word)
