"""examples/pretrain_gpt.py with a fault in the operator of use_fused_rmsnorm, chosen by the name of the arm.

`python faulty_script.py ARGS`: an arm called `wrong`, `slow`, `crash` or `hang` gets that fault, any
other none.
"""

import os
import runpy
import sys
import time
from pathlib import Path

import torch

import mindspeed_lite.megatron_adaptor  # noqa: F401
from mindspeed_lite.bench.plan import RunPlan
from mindspeed_lite.patches.use_fused_rmsnorm import FusedRMSNorm

# Compiling takes most of such a short run and is not what is tested.
torch.compiler.set_stance("force_eager")
torch.set_num_threads(1)

plan = os.environ.get("MINDSPEED_LITE_BENCH")
fault = RunPlan.read(plan).arm.name if plan else ""
right = FusedRMSNorm.operator
calls = 0


def rms_norm(x, weight, eps, zero_centered):
    global calls
    calls += 1
    if fault == "slow":
        time.sleep(0.05)
    elif calls > 20 and fault == "crash":
        raise RuntimeError("the planted crash")
    elif calls > 20 and fault == "hang":
        time.sleep(3600)
    y = right(x, weight, eps, zero_centered)
    return y * 1.05 if fault == "wrong" else y


FusedRMSNorm.operator = staticmethod(rms_norm)
script = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"
sys.argv[0] = str(script)
runpy.run_path(str(script), run_name="__main__")
