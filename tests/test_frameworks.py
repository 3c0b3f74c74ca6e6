"""The scripts of `examples/frameworks`, each where its framework is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness import checkouts
from tests.harness.processes import clean_environment
from tests.harness.training import DRIFT

FOLDER = Path(__file__).parents[1] / "examples" / "frameworks"
STAND_IN = checkouts.ROOT / "tests" / "te_contract" / "stand_in"
OURS = "mindspeed_lite_plugin,verl_post_training"


def last_line(script: str, ranks: int, *options: str, path: Sequence[Any], **environment: str) -> Any:
    """What a script of the examples prints last, as JSON; `path` comes first on its PYTHONPATH."""
    joined = os.pathsep.join(map(str, (*path, FOLDER, checkouts.ROOT, os.environ.get("PYTHONPATH", ""))))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, script, *options], cwd=FOLDER, env=clean_environment(PYTHONPATH=joined, **environment),
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def steps(modules: str, ranks: int, *options: str) -> list[dict[str, Any]]:
    path = [checkouts.folder("0.16.1")]
    found: list[dict[str, Any]] = last_line(
        "verl_ppo.py", ranks, *options, path=path, VERL_USE_EXTERNAL_MODULES=modules
    )
    return found


@pytest.mark.whole
@pytest.mark.parametrize(
    ("script", "package", "layers"),
    [
        ("ms_swift_steps.py", "mcore_bridge", {"TEColumnParallelLinear", "TELayerNormColumnParallelLinear"}),
        ("megatron_bridge_steps.py", "megatron.bridge", {"TELayerNormColumnParallelLinear", "TERowParallelLinear"}),
    ],
)
def test_models_of_frameworks_train_with_features(script: str, package: str, layers: set[str]) -> None:
    """Two steps with Transformer Engine's layers, which are the stand-in's, as without features."""
    if not importlib.util.find_spec(package):
        pytest.skip(f"{package} is not installed")
    on, off = (last_line(script, 1, path=[STAND_IN], MINDSPEED_LITE_FEATURES=given) for given in ("on", "off"))
    assert len(on["losses"]) == 2 and on["losses"] == pytest.approx(off["losses"], rel=DRIFT)
    assert layers & {*on["layers"]} and on["layers"] == off["layers"] and "features" not in off
    assert {"use_fused_adamw", "use_fused_cross_entropy", "use_fused_swiglu"} <= {*on["features"]}


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
