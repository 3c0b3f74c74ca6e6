"""The demo's own steps: which script, which flags, what a failure looks like. Training it all is `make demo`."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from demo import data, run
from tests.harness import matrix

ROOT = Path(__file__).resolve().parents[2]
FALLING = [5.5 * 0.96**step for step in range(30)]


def checkout(folder: Path, version: str) -> Path:
    info = folder / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True)
    info.write_text(f"__version__ = {version!r}\n")
    (folder / "pretrain_gpt.py").write_text("")
    return folder


def test_without_a_checkout_our_script_runs_on_the_installed_megatron() -> None:
    script = run.find_script(None)
    assert script.file == ROOT / "examples" / "pretrain_gpt.py" and script.path == (str(ROOT),)


def test_a_checkout_runs_its_own_script_with_its_own_megatron(tmp_path: Path) -> None:
    script = run.find_script(str(checkout(tmp_path, "0.17.1")))
    assert (script.file, script.path[0], script.version) == (tmp_path / "pretrain_gpt.py", str(tmp_path), "0.17.1")
    flags = run.training_arguments(script, Path("data"), "bf16", 20)
    assert flags[flags.index("--vocab-size") + 1] == "256" and "--bf16" in flags
    assert "--bf16" not in run.training_arguments(script, Path("data"), "fp32", 20)


def test_a_folder_that_is_no_checkout_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "OUTPUT", tmp_path)
    monkeypatch.setenv("MEGATRON_LM", str(tmp_path))
    assert run.main([]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "is no Megatron-LM checkout: no pretrain_gpt.py" in error


def test_training_has_this_environment_first_and_is_never_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "theirs")
    monkeypatch.setenv("MINDSPEED_LITE_DISABLE", "1")
    environment = run.environment(run.Script(Path("x.py"), ("first", "second"), "0.19.2"))
    assert environment["PYTHONPATH"].split(os.pathsep) == ["first", "second", "theirs"]
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert "MINDSPEED_LITE_DISABLE" not in environment


def test_a_loss_falls_or_there_is_a_reason() -> None:
    assert run.why_not_falling(FALLING) is None
    assert "went from 5.500 to" in str(run.why_not_falling([*FALLING, *[5.4] * 5]))
    for bad in (math.nan, math.inf):
        assert run.why_not_falling([*FALLING[:9], bad, *FALLING]) == "the loss of step 10 is not a number"


def test_too_few_steps_to_say_anything_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run.main(["--steps", "3"])
    assert ended.value.code == 2
    assert "at least 20 steps" in capsys.readouterr().err


@matrix.whole
def test_a_small_demo_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "OUTPUT", tmp_path)
    monkeypatch.setattr(run, "FALL", 0.8)
    monkeypatch.setattr(run, "MODEL", {"layers": 1, "hidden": 64, "heads": 4, "sequence": 256})
    monkeypatch.setattr(data, "NOT_TEXT", ("[a-z]*",))
    assert run.main(["--steps", "20", "--rounds", "1"]) == 0
    said = capfd.readouterr().out
    assert "Compared with off" in said and said.endswith("PASSED: the loss falls, and off and on agree.\n")


@matrix.whole
def test_the_example_says_in_one_sentence_that_a_wheel_without_training_is_too_old() -> None:
    code = (
        "import runpy, sys; sys.modules['megatron.training'] = None; "
        f"runpy.run_path({str(ROOT / 'examples' / 'pretrain_gpt.py')!r}, run_name='__main__')"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert ended.returncode == 1
    assert "needs megatron.training, which the wheels of megatron-core have from 0.17 on" in ended.stderr
    assert "Traceback" not in ended.stderr
