"""examples/pretrain_gpt.py with all that Liger-Kernel's patch of Megatron replaces."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from liger_kernel.megatron import apply_liger_kernel_to_megatron

if __name__ == "__main__":
    apply_liger_kernel_to_megatron(rms_norm=True, cross_entropy=True, swiglu=True)
    script = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"
    sys.argv[0] = str(script)
    runpy.run_path(str(script), run_name="__main__")
