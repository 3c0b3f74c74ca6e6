"""What `examples/` has: launch scripts with one set of flags at both sizes, a notebook, and a plugin for frameworks."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import matrix
from tests.harness.checkouts import ROOT
from tests.harness.commands import python
from tests.harness.processes import forked
from tests.harness.training import SCRIPT, Trainer

OTHERS = "launch.sh", "long_context.sh"
SCRIPTS = sorted(path.name for path in (ROOT / "examples").glob("*.sh") if path.name not in OTHERS)


def printed(name: str, *arguments: str, **environment: str) -> list[str]:
    command = ["bash", str(ROOT / "examples" / name), "--print", *arguments]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin", **environment}
    )
    return shlex.split(ran.stdout)


def flags(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


def test_there_are_five() -> None:
    assert len(SCRIPTS) == 5


@pytest.mark.parametrize("name", SCRIPTS)
def test_small_sizes_go_through_the_same_flags(name: str) -> None:
    real, tiny = printed(name), printed(name, "--tiny")
    launcher = {"--standalone", "--node-rank", "--master-addr", "--master-port"}
    assert flags(tiny) - flags(real) - launcher == {"--mock-data", "--vocab-size"}
    assert flags(real) - flags(tiny) - launcher == {
        "--data-path", "--tokenizer-model", "--save", "--load", "--save-interval"
    }  # fmt: skip
    own = printed(name, "--lr", "7e-7", SCRIPT="/m/pretrain_gpt.py")
    assert own[-2:] == ["--lr", "7e-7"] and own[own.index("-m") : own.index("-m") + 4] == [
        "-m", "mindspeed_lite", "run", "/m/pretrain_gpt.py"
    ]  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_without_its_paths_is_one_line(name: str) -> None:
    ran = subprocess.run(
        ["bash", str(ROOT / "examples" / name)], capture_output=True, text=True, env={"PATH": "/bin:/usr/bin"}
    )
    assert ran.returncode == 2 and ran.stdout == ""
    assert re.fullmatch(r"\S+: set DATA_PATH .* or give --tiny\n", ran.stderr)


@pytest.mark.parametrize("name", matrix.only(["deepseek_v3.sh"], SCRIPTS))
def test_small_sizes_train(trainer: Callable[[str], Trainer], name: str, tmp_path: Path) -> None:
    words = printed(name, "--tiny", "--train-iters", "4", "--mindspeed-lite-report", str(tmp_path / "report.json"))
    nproc = int(words[words.index("--nproc-per-node") + 1])
    place = next(place for place, word in enumerate(words) if word.endswith("pretrain_gpt.py"))
    argv = [SCRIPT, *words[place + 1 :]]
    losses = trainer("0.19.2").run(entry="script", arm="adaptor", nproc=nproc, argv=argv).check().losses()
    assert len(losses) == 4 and all(0 < loss < 8 for loss in losses)


@matrix.whole
def test_the_notebook_runs_and_is_stored_with_its_outputs(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """`pytest --update` stores what its cells print here."""
    file = ROOT / "examples" / "enable.ipynb"
    notebook = json.loads(file.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    end = "\nprint('end of cell')\n"
    (tmp_path / "cells.py").write_text(end.join("".join(cell["source"]) for cell in code))
    run = python("-W", "ignore", "cells.py", cwd=tmp_path, MINDSPEED_LITE_DEVICE="cpu", OMP_NUM_THREADS="1")
    assert run.returncode == 0, run.stderr
    assert "did you mean use_flash_attn" in run.stdout and run.stdout.endswith("[]\n")
    printed_cells = run.stdout.split("end of cell\n")
    if request.config.getoption("--update"):
        for number, (cell, text) in enumerate(zip(code, printed_cells, strict=True), 1):
            stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
            cell |= {"execution_count": number, "outputs": [stream] if text else []}
        file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    stored = ["".join(line for output in cell["outputs"] for line in output["text"]) for cell in code]
    assert [text.count("\n") for text in stored] == [text.count("\n") for text in printed_cells]
    (off, on) = re.findall(r": +([\d.]+) ms a step, +([\d.]+) MB kept", run.stdout)
    assert float(on[1]) < float(off[1])


# The plugin of `examples/frameworks`, as a framework imports it: before megatron.core, and after.
@pytest.mark.parametrize("is_first", [True, False])
@forked("features")
def test_features_are_on_once_megatron_is_there(is_first: bool) -> None:
    import mindspeed_lite

    sys.path.insert(0, str(ROOT / "examples" / "frameworks"))
    for name in ("mindspeed_lite_plugin", "megatron.core") if is_first else ("megatron.core", "mindspeed_lite_plugin"):
        assert mindspeed_lite.report() is None
        importlib.import_module(name)
    applied = {each.feature for each in mindspeed_lite.report().entries if each.status == "applied"}
    assert {"use_flash_attn", "use_fused_adamw"} <= applied & {*sys.modules["mindspeed_lite_plugin"].FEATURES}
