"""The demo's own steps: which script, which flags, what a failure looks like. Training is `make demo`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from demo import run
from tests.harness import matrix

ROOT = Path(__file__).resolve().parents[2]


def checkout(folder: Path, version: str) -> Path:
    info = folder / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True)
    info.write_text(f"__version__ = {version!r}\n")
    (folder / "pretrain_gpt.py").write_text("")
    return folder


def test_without_a_checkout_our_script_runs_on_the_installed_megatron() -> None:
    script = run.find_script(None)
    example = str(ROOT / "examples" / "pretrain_gpt.py")
    assert script.command == (sys.executable, "-m", "mindspeed_lite", "run", example)
    assert script.path == (str(ROOT),)


def test_a_checkout_runs_its_own_script_with_its_own_megatron(tmp_path: Path) -> None:
    script = run.find_script(str(checkout(tmp_path, "0.17.1")))
    assert script.command[1:] == ("-m", "mindspeed_lite", "run", str(tmp_path / "pretrain_gpt.py"))
    assert script.path[0] == str(tmp_path)
    assert script.version == "0.17.1"
    flags = run.training_arguments(script, Path("data"), "bf16", 60, 20)
    assert flags[flags.index("--vocab-size") + 1] == "256"
    assert "--bf16" in flags
    assert (flags[flags.index("--train-iters") + 1], flags[flags.index("--lr-decay-iters") + 1]) == ("20", "60")
    assert "--bf16" not in run.training_arguments(script, Path("data"), "fp32", 60, 60)


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(run.DemoError, match=r"is no Megatron-LM checkout: no pretrain_gpt\.py"):
        run.find_script(str(tmp_path))


def test_training_has_this_environment_first_and_is_never_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "theirs")
    monkeypatch.setenv("MINDSPEED_LITE_DISABLE", "1")
    environment = run.environment(run.Script("name", ("python",), ("first", "second"), "0.19.2"))
    assert environment["PYTHONPATH"].split(os.pathsep) == ["first", "second", "theirs"]
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert "MINDSPEED_LITE_DISABLE" not in environment


def script_that(code: str) -> run.Script:
    return run.Script("a script", (sys.executable, "-c", code), (), "0.19.2")


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run, "OUTPUT", tmp_path)
    return tmp_path


def test_a_training_run_gives_its_log_and_its_own_peak_memory(output: Path) -> None:
    wait = "import time; time.sleep(1)"
    small = run.train(script_that(f"print('said'); {wait}"), [], output / "small.log", "small")
    large = run.train(script_that(f"x = b'x' * 300_000_000; {wait}"), [], output / "large.log", "large")
    assert (output / "small.log").read_text() == "said\n"
    if sys.platform == "linux":
        assert small is not None and large is not None
        assert small < 100 and 290 < large < 400


def test_a_failed_training_run_shows_the_end_of_its_log_and_where_it_is(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    code = "import sys; [print('line', n) for n in range(50)]; sys.exit('the reason')"
    with pytest.raises(run.DemoError) as caught:
        run.train(script_that(code), [], output / "off-1.log", "round 1")
    text = str(caught.value)
    assert "code 1" in text and "off-1.log" in text and text.endswith("the reason")
    assert "line 31" in text and "line 30" not in text


def test_a_training_run_that_hangs_is_ended(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LONGEST_RUN", 0.2)
    with pytest.raises(run.DemoError, match="No end after"):
        run.train(script_that("import time; time.sleep(60)"), [], output / "off-1.log", "round 1")


def test_an_old_python_gets_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(run, "OLDEST_PYTHON", (99, 0))
    assert run.main([]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "needs Python 99.0 or later" in error


def test_too_few_steps_to_say_anything_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run.main(["--steps", "3"])
    assert ended.value.code == 2
    assert "at least 20 steps" in capsys.readouterr().err


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
