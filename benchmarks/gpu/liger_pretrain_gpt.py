"""examples/pretrain_gpt.py with all that Liger-Kernel's patch of Megatron replaces."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"

if __name__ == "__main__":
    # As if Python had started that script: this folder's modules hide none of a library's.
    sys.path[0], sys.argv[0] = str(SCRIPT.parent), str(SCRIPT)
    from liger_kernel.megatron import apply_liger_kernel_to_megatron

    apply_liger_kernel_to_megatron(rms_norm=True, cross_entropy=True, swiglu=True)
    runpy.run_path(str(SCRIPT), run_name="__main__")
