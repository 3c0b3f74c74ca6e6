"""Preparing the environment: what is said where it cannot be done, and what a subprocess finds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.npu_contract import environment as made
from tests.npu_contract import stubs, support_table
from tests.npu_contract.environment import MODES, Environment, NotPreparedError


def test_a_wheel_is_of_the_release_of_its_torch() -> None:
    """By its name, and by what those that were read for the support table ask for."""
    read = json.loads(support_table.DATA.read_text())["wheels"].values()
    wants = {each["wheel"].split("-")[1]: each["requires"] for each in read if "wheel" in each}
    for torch, wheel in made.WHEELS.items():
        assert made.wheel_for(torch) == wheel and wheel.partition(".post")[0] == torch
        assert all(re.match(rf"torch ?=={re.escape(torch)}\b", each) for each in wants.get(wheel, ()))
    assert len(set(made.WHEELS.values()) & set(wants)) > 5


def test_a_missing_wheel_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(*args: object, **kwargs: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "ERROR: a\nERROR: No matching distribution found\n")

    monkeypatch.setattr(made.subprocess, "run", fails)
    monkeypatch.setattr(made, "torch_version", lambda: "2.11.0")
    with pytest.raises(NotPreparedError) as caught:
        made.prepare(tmp_path)
    assert "torch-npu==" in str(caught.value) and "No matching distribution found" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "site").exists()


def test_a_missing_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool in ("gcc", "nm") else f"/bin/{tool}")
    with pytest.raises(stubs.ToolError, match=r"^gcc, nm not found: .*apt-get install") as caught:
        stubs.build(tmp_path, tmp_path, tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_our_settings_do_not_reach_a_subprocess(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MINDSPEED_LITE_DEVICE", "CANN_STUB_MODE", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "mine")
    for mode in MODES:
        variables = Environment("0", tmp_path, tmp_path).variables(mode)
        assert "mine" not in variables.values()
        assert variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
        assert variables["CANN_STUB_MODE"] == mode


def test_this_process_has_nothing_of_it() -> None:
    assert str(made.FOLDER / "site") not in sys.path
    assert all(str(made.FOLDER) not in (getattr(module, "__file__", None) or "") for module in [*sys.modules.values()])


SAYS = """
import torch

def tried(made):
    try:
        return made()
    except Exception as error:
        return type(error).__name__

print(torch.npu.is_available(), torch.npu.device_count())
moved = tried(lambda: torch.ones(2).to("npu"))
print(moved if isinstance(moved, str) else [moved.cpu().tolist(), (moved * 3).cpu().tolist()])
"""


@pytest.mark.parametrize(
    ("mode", "devices", "variables", "said"),
    [
        ("fake", 1, {}, ["True 1", "RuntimeError"]),
        ("host", 8, {}, ["True 8", "[[1.0, 1.0], [0.0, 0.0]]"]),
        ("host", 1, {"TASK_QUEUE_ENABLE": "1"}, ["True 1", "RuntimeError"]),
    ],
    ids=["fake", "host", "host with a queue"],
)
def test_the_device_of_a_mode(
    environment: Environment, mode: str, devices: int, variables: dict[str, str], said: list[str]
) -> None:
    """Only the host's memory can be used, and what it computes cannot be taken for a result."""
    ran = environment.run(SAYS, mode, devices=devices, **variables)
    assert ran.stdout.splitlines()[-2:] == said, ran.stderr
