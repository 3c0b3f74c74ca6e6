"""`mindspeed-lite dryrun` as a user calls it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter

import pytest

from mindspeed_lite.cli import dryrun as command
from mindspeed_lite.dryrun.launch import TrainingLaunch
from tests.harness.checkouts import ROOT
from tests.harness.processes import clean_environment
from tests.harness.training import MODEL

SCRIPT = str(ROOT / "examples" / "pretrain_gpt.py")


def dryrun(*words, folder, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "mindspeed_lite", "dryrun", *words],
        cwd=folder, capture_output=True, text=True, env=clean_environment(), timeout=600,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr.rpartition("---")[2]
    return done.stdout if not code or done.stdout else done.stderr


def test_the_command_itself_imports_no_torch():
    rooms = "from mindspeed_lite.dryrun import launch, match, rank, reserve, timing"
    code = f"import sys; from mindspeed_lite.cli import dryrun; {rooms}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env=clean_environment(), check=True)


def test_sixty_four_ranks_on_one_machine(tmp_path):
    """Rank 0 and the other stage of its pipeline run; a device that is too small is said."""
    flags = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
    said = dryrun(
        "--device", "h100", "--memory", "0.0005", "--json", "report.json",
        "--", "torchrun", "--nnodes", "8", "--nproc-per-node", "8", SCRIPT, *MODEL, *flags.split(),
        "--use-flash-attn", "--use-fused-swiglu", "--swap-attention", "--reduce-host-syncs", "--train-iters", "5",
        "--global-batch-size", "256",
        folder=tmp_path, code=1,
    )  # fmt: skip
    assert "memory of 2 of 64 ranks; 3 of 8 micro-batches were run" in said
    # The latter swaps functions that Megatron gives to torch.compile.
    assert "use_flash_attn, use_fused_adamw" in said and "not counted: use_fused_swiglu" not in said
    assert "Transformer Engine cannot be imported" in said
    assert "collectives match on the 2 ranks that ran" in said
    assert "not counted: swap_attention: cpu has one memory" in said
    assert "does not fit: rank 0 takes" in said and "1.06 GB for context" in said
    assert re.search(r"too much; .* are \w+, which take less with --.*B\), .* or more ", said)
    assert "a step takes" in said and "Predicted, from operators and messages of this run on h100-sxm" in said
    assert "TENSOR_MODEL_PARALLEL_GROUP" in said
    assert "work of rank 0 on 3 micro-batches" in said and "decoder.layers.*.mlp.linear_fc1" in said
    assert "host synchronisations of rank 0 in a step of 3 micro-batches" in said
    assert re.search(r"^ +\d+ +cpu +megatron\.core\.tensor_parallel\.data:\d+ _build", said, re.MULTILINE), said
    # Of one layer a rank, in three micro-batches.
    assert re.search(r"^decoder\.layers\.\* +3 +[\d.]+ +[\d.]+$", said, re.MULTILINE), said
    found = json.loads((tmp_path / "report.json").read_text())
    assert [each["number"] for each in found["ranks"]] == [0, 32] and not found["problems"]
    # Both products of a backward have the size of the forward's.
    sums = Counter()
    for each in found["ranks"][0]["work"]:
        sums[each["pass"]] += each["flops"] if each["module"].startswith("decoder.layers.*.mlp.") else 0
    assert sums["backward"] == 2 * sums["forward"] > 0 == sums["optimizer"]
    assert "decoder.layers.*.mlp" in {each["module"] for each in found["ranks"][0]["memory"]["kept"]}
    step = found["step"]
    assert step["step_s"] == sum(step["parts"].values()) > step["exposed"] > 0
    assert {"products", "attention", "vector", "tensor parallel", "pipeline", "optimizer"} <= {*step["parts"]}
    assert {*tmp_path.iterdir()} == {tmp_path / "report.json"}


@pytest.mark.parametrize(
    ("words", "text", "code"),
    [
        (["--", "echo", "hello"], "starts no torchrun and no python script: hello", 2),
        (["--", "python", SCRIPT, "--no-such-flag"], "rank 0 of 1: the script ended with 2: ", 1),
        (["--", "python", "missing.py"], "there is no script missing.py", 2),
        (["--memory", "none", "--", "python", SCRIPT], "--memory: takes", 2),
        (["--device", "h1", "--", "python", SCRIPT], "--device h1: there is no such device", 2),
    ],
)
def test_bad_input_is_one_line(words, text, code, tmp_path):
    assert text in dryrun(*words, folder=tmp_path, code=code)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("world_size (8) is not divisible by 32", "starts 8 ranks: set its --nnodes"),
        ("error: unrecognized argument '2B:3': it belongs to no flag", "after --step-batch-size-schedule, whose value"),
        ("error: unrecognized argument 'c': it belongs to no flag", ""),
    ],
)
def test_an_error_says_what_to_change_in_the_command(error, text):
    words = ("a.py", "c", "--step-batch-size-schedule", "0:1", "2B:3", "--bf16")
    hint = command._hint(error, TrainingLaunch("python", False, words, ".", {}, 8, 8))
    assert text in hint and bool(hint) is bool(text)
