"""What a launch command would start is found without starting it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from mindspeed_lite.dryrun import launch

SCRIPT = """#!/bin/bash
cd $(dirname $0)/inner
export CUDA_DEVICE_MAX_CONNECTIONS=1 NNODES=4
python -c 'print(1)' > /dev/null
torchrun --nproc_per_node 8 --nnodes $NNODES --node_rank 0 pretrain_gpt.py \\
    --num-layers 2 "--data-path a b" | tee log
"""


@pytest.fixture(autouse=True)
def scripts(tmp_path, monkeypatch):
    for name in ("a.py", "pretrain_gpt.py"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)


def test_torchrun_gives_the_size_of_the_world():
    found = launch.find("torchrun --nproc-per-node 4 --nnodes 2 pretrain_gpt.py --num-layers 2".split())
    assert (found.world_size, found.local_size) == (8, 4)
    assert found.words == ("pretrain_gpt.py", "--num-layers", "2")


@pytest.mark.parametrize(
    ("command", "words", "size"),
    [
        ("python -m torch.distributed.run --nproc-per-node 2 a.py --x", ("a.py", "--x"), 2),
        ("torchrun --nproc-per-node 2 -m mindspeed_lite run a.py --x", ("a.py", "--x"), 2),
        ("torchrun -r 3 --stand --nnod 1 --nproc-per-node 2 a.py --x", ("a.py", "--x"), 2),
        ("torchrun -m --nproc 2 package.module --x", ("-m", "package.module", "--x"), 2),
        ("env PET_NNODES=3 torchrun --standalone --log-dir=l --nproc_per_node=2 --rdzv_id 7 a.py", ("a.py",), 6),
        ("python a.py --x", ("a.py", "--x"), 1),
        ("python -m mindspeed_lite run a.py --x", ("a.py", "--x"), 1),
        (f"{sys.executable} -u a.py", ("a.py",), 1),
        (f"bash -c '{sys.executable} -m torch.distributed.run --nproc-per-node 2 a.py'", ("a.py",), 2),
        ("torchrun --nproc-per-node 2 mindspeed-lite run a.py", ("a.py",), 2),
        ("mindspeed-lite run a.py --x", ("a.py", "--x"), 1),
        ("bash -c 'nohup torchrun --nproc-per-node 2 a.py > log 2>&1 &'", ("a.py",), 2),
        ("env PYTHONPATH=/nowhere torchrun --nproc-per-node 2 a.py", ("a.py",), 2),
    ],
)
def test_other_launchers(command, words, size, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    found = launch.find(shlex.split(command))
    assert (found.words, found.world_size) == (words, size)
    assert found.is_run is ("mindspeed" in command) and Path(found.interpreter).name.startswith("python")


def test_a_shell_script_keeps_its_folder_and_environment(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/pretrain_gpt.py").touch()
    path = tmp_path / "launch.sh"
    path.write_text(SCRIPT)
    found = launch.find(["bash", str(path)])
    assert found.world_size == 32 and found.folder == str(tmp_path / "inner")
    assert found.words == ("pretrain_gpt.py", "--num-layers", "2", "--data-path a b")
    assert found.environment["NNODES"] == "4" and "mindspeed-lite-dryrun" not in found.environment["PYTHONPATH"]


def test_paths_without_quotes_are_said(tmp_path):
    words = "--save your own path --data-path 1 a 2 b --tokenizer-name-or-path your tokenizer --bf16 stray"
    found = launch.find(f"python a.py {words}".split())
    assert found.unquoted == ("--save", "--tokenizer-name-or-path")
    kept = "--save your --data-path 1 a 2 b --tokenizer-name-or-path your --bf16 stray"
    assert found.words == ("a.py", *kept.split())


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("echo hello", "starts no torchrun and no python script: hello"),
        ("python -m mindspeed_lite --help", "starts no torchrun and no python script"),
        ("no_such_program x", "no_such_program does not run: No such file or directory$"),
        ("'torchrun a.py'", "torchrun a.py does not run: .*: leave out the quotes around the whole command"),
        ("sh -c 'exit 3'", "starts no torchrun and no python script: it printed nothing and ended with 3"),
        ("torchrun --nproc-per-node gpu a.py", "do not say how many ranks"),
        ("torchrun --nnodes --nproc-per-node 2 a.py", "--nnodes has no value: a variable of the command may be unset"),
        ("torchrun --nproc-per-nodes 2 a.py", "torchrun has no option --nproc-per-nodes"),
        ("torchrun --nnodes 2", "torchrun starts no script: --nnodes 2"),
        ("torchrun --nproc-per-node 2 none.py", "there is no script none.py in "),
    ],
)
def test_what_starts_no_training_is_one_line(command, text, capfd):
    with pytest.raises(launch.LaunchError, match=text) as error:
        launch.find(shlex.split(command))
    assert "\n" not in str(error.value)


def test_options_are_those_of_torchrun():
    from torch.distributed.run import get_args_parser

    actions = get_args_parser()._actions
    names = {name.lstrip("-").replace("_", "-"): each.nargs == 0 for each in actions for name in each.option_strings}
    # `python -m torch.distributed.launch` has one more, and help starts nothing.
    assert names.keys() - {"h", "help"} == {*launch._OPTIONS} - {"use-env"}
    assert {name for name, is_switch in names.items() if is_switch} - {"h", "help"} == {*launch._SWITCHES}
