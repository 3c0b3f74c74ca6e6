"""`mindspeed-lite doctor` where torch_npu is installed: what is wrong and what to do, whatever torch_npu does."""

from __future__ import annotations

import json

import pytest

from mindspeed_lite.platform import npu
from tests.harness import fake_torch_npu, matrix
from tests.harness.commands import command, fails_in_one_line

# Nothing of CANN's in the environment, whatever this machine has.
BARE = {"ASCEND_HOME_PATH": "", "ASCEND_RT_VISIBLE_DEVICES": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}


def examined(folder, *options, **variables):
    """The rows of `doctor --json` by check; nothing on stderr, and no check that broke."""
    run = command("doctor", "--json", *options, path=[folder], **{**BARE, **variables})
    assert run.stderr == "", run.stderr
    document = json.loads(run.stdout)
    assert run.returncode == (0 if document["ready"] else 1)
    assert not [row for row in document["rows"] if "cannot be examined" in row["text"]]
    return {row["check"]: row for row in reversed(document["rows"])}


NO_HCCL = fake_torch_npu.NO_LIBRARY.format(library="libhccl.so")


@pytest.mark.parametrize(
    ("body", "options", "status", "texts", "fix"),
    [
        (NO_HCCL, {}, "note", [fake_torch_npu.MATCHING, "libhccl.so is not found and ASCEND_HOME_PATH is not set"],
         "set_env.sh"),
        (fake_torch_npu.ABORTS, {}, "note",
         ["importing torch_npu", "ends the process (SIGABRT): the runtime is not pleased"], "matching set"),
        (fake_torch_npu.HANGS, {}, "note", ["importing torch", "does not end (given up after 6 s)"], "--timeout"),
        (fake_torch_npu.WORKS, {"transfer": "raise ImportError('no such name')"}, "problem",
         ["transfer_to_npu does not import: ImportError: no such name"], "matches your torch"),
    ],
    ids=["library", "aborts", "hangs", "mapping"],
)  # fmt: skip
@matrix.whole
def test_what_is_wrong_and_what_to_do(tmp_path, body, options, status, texts, fix):
    fake_torch_npu.torch_npu(tmp_path, body, **options)
    found = examined(tmp_path, "--timeout", "6" if body == fake_torch_npu.HANGS else "60")
    row, device = found["torch_npu"], found["device"]
    assert row["status"] == status and all(text in row["text"] for text in texts) and fix in row["fix"], row
    assert found["torch"]["status"] == device["status"] == "ok", "training can start without it"
    assert "transfer" in options or fix in device["text"]
    if body == NO_HCCL:
        device = examined(tmp_path, MINDSPEED_LITE_DEVICE="npu")["device"]
        assert device["status"] == "problem" and fix in device["text"]


@matrix.whole
def test_torch_that_loads_it_fails_with_it(tmp_path):
    fake_torch_npu.torch_npu(tmp_path, fake_torch_npu.NO_LIBRARY.format(library="libascendcl.so"), autoload=True)
    found = examined(tmp_path)
    row = found["torch"]
    assert row["status"] == "problem" and "`import torch` fails, for it loads torch_npu" in row["text"]
    assert "libascendcl.so" in row["text"], "the cause, which torch's own message leaves out"
    assert "set_env.sh" in row["fix"] and "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in row["fix"]
    assert found["device"]["status"] == "ok" and found["device"]["text"].startswith("c")


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
    assert "operators by npu" in found["features"]["text"] and "attention" not in found["features"]["text"]


def test_a_selftest_without_an_npu_says_why_in_the_same_words(tmp_path, monkeypatch):
    fake_torch_npu.torch_npu(tmp_path, NO_HCCL)
    run = command("doctor", "--npu-selftest", path=[tmp_path], cwd=tmp_path, **BARE)
    monkeypatch.syspath_prepend(tmp_path)
    for name, value in BARE.items():
        monkeypatch.setenv(name, value)
    fails_in_one_line(run, "--npu-selftest", str(npu.trouble()))
    assert [each.name for each in tmp_path.glob("*.json")] == []


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
