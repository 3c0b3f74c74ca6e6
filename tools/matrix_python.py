"""Trains a handful of features off and on, and checks every operator, in this interpreter with its torch.

    python3.10 -m venv ENV; ENV/bin/pip install torch==2.6.0 numpy wrapt packaging
    ENV/bin/python -m tools.matrix_python --release 0.16.1      from the repository's root

Writes docs/matrix.json, from which `python docs/generate.py` makes the table of docs/support.md. `make matrix-python
PYTHON=python3.10 TORCH=2.6.0` makes the environment, runs this and deletes the environment.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from mindspeed_lite import runtime
from mindspeed_lite.bench.selftest import FAILED, numerics
from tests.harness import checkouts, on_and_off
from tests.harness.training import Trainer
from tools import matrix

FEATURES = [
    "gradient_accumulation_fusion",
    "reuse_fp32_param",
    "use_flash_attn",
    "use_fused_adamw",
    "use_fused_cross_entropy",
    "use_fused_rmsnorm",
    "use_fused_rotary_pos_emb",
    "use_fused_swiglu",
]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.matrix_python", description="This Python and this torch.")
    parser.add_argument("--release", nargs="+", required=True, metavar="VERSION", help="of those in .releases/")
    options = parser.parse_args(arguments)
    try:
        roots = {release: checkouts.fetched(release) for release in options.release}
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    name = f"Python {'.'.join(platform.python_version_tuple()[:2])}, torch {torch.__version__.partition('+')[0]}"
    checks = numerics.checks("cpu", quick=True)
    wrong = [check.name for check in checks if check.run().status == FAILED]
    faults = len(wrong)
    for release, root in roots.items():
        with tempfile.TemporaryDirectory() as scratch:
            trainer = Trainer(root, Path(scratch), training=False)
            try:
                found = on_and_off.trained(trainer, "plain", FEATURES)
            finally:
                trainer.close()
        bad = [
            f"{feature}: {fault}"
            for feature, outcome in found.items()
            if (fault := outcome.fault(on_and_off.numerics_of(runtime.catalogue()[feature])))
        ]
        row = {
            "features": len(found) - len(bad),
            "of": len(found),
            "operators": len(checks) - len(wrong),
            "checks": len(checks),
            "fault": "; ".join([*bad, *wrong]),
            "drift": float(f"{max(each.drift() for each in found.values()):.2g}"),
        }
        matrix.record("environments", name, {release: {**row, **matrix.stamp()}})
        print(f"{name}, megatron-core {release}: {row}", flush=True)
        faults += len(bad)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
