"""verl's Megatron engine with our memory and log-probabilities, as `examples/frameworks` puts them there."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import checkouts
from tests.harness.processes import clean_environment

FOLDER = Path(__file__).parents[1] / "examples" / "frameworks"
OURS = "mindspeed_lite_plugin,verl_post_training"


def steps(modules: str, ranks: int, *options: str) -> list[dict[str, Any]]:
    release = checkouts.folder("0.16.1")
    path = os.pathsep.join(str(each) for each in (release, FOLDER, checkouts.ROOT))
    environment = clean_environment(
        PYTHONPATH=path, VERL_USE_EXTERNAL_MODULES=modules, MINDSPEED_LITE_DEVICE="cpu", OMP_NUM_THREADS="1"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["verl_ppo.py", *options]
    done = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("verl", "mbridge"))), reason="verl and mbridge are not installed"
)
def test_verls_engine_trains_with_our_memory_and_log_probabilities() -> None:
    theirs = steps("mindspeed_lite_plugin", 1, "--logits")
    assert steps(OURS, 1, "--logits") == theirs, "not the bits of verl's own offload"
    of_two = ["--tensor-parallel", "2"]
    assert_near(steps(OURS, 1), theirs)
    assert_near(steps(OURS, 2, *of_two), steps("mindspeed_lite_plugin", 2, *of_two, "--logits"))


def assert_near(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Log-probabilities of bf16 logits that are rounded once more by verl; steps of Adam add to that."""
    assert len(ours) == len(theirs) == 3
    for on, off in zip(ours, theirs, strict=True):
        assert on["asleep"] == 0 < on["awake"] and on["exported"] == off["exported"]
        for name in ("loss", "entropy", "grad_norm"):
            assert on[name] == pytest.approx(off[name], rel=2.0**-6), name
