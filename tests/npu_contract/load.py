"""Loads stubs, torch and torch_npu in this order, then runs what is named: the first lines of every subprocess.

`python -m tests.npu_contract.load MODULE_OR_SOURCE [ARGUMENT ...]`, with the variables of `Environment.variables`.
"""

from __future__ import annotations

import ctypes
import os
import re
import runpy
import sys
from pathlib import Path


def load(folder: Path) -> None:
    """Make torch_npu importable: what it needs of CANN comes from `folder`."""
    # The first library holds what the others need; all must be global, as torch_npu looks names up everywhere.
    base = folder / "libcann_stub.so"
    for library in (base, *sorted(set(folder.glob("lib*.so")) - {base})):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401

    unclaim = folder / "cann_allocator.so"
    if unclaim.is_file():
        ctypes.CDLL(str(unclaim)).cann_stub_unclaim_allocator_keys()
    import torch_npu  # noqa: F401


def main() -> None:
    target = sys.argv[1]
    sys.argv = sys.argv[1:]
    load(Path(os.environ["CANN_STUB_FOLDER"]))
    if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", target):
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        exec(compile(target, "<npu_contract>", "exec", dont_inherit=True), {"__name__": "__main__"})
    # All is written. Without the wheel's destructors: over these stubs one has aborted, once in many runs.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
