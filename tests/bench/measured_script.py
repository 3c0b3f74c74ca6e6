"""A training script that counts its memory, in a fork.

The plan's file is named by the environment, as it is for a process that a measurement starts.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from mindspeed_lite.bench import worker
from mindspeed_lite.bench.plan import VARIABLE

if __name__ == "__main__":
    worker.start(os.environ[VARIABLE])
    script = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"
    sys.argv[0] = str(script)
    runpy.run_path(str(script), run_name="__main__")
