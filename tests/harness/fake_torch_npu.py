"""Packages that stand in for torch_npu: each is torch_npu on a machine where one particular thing is wrong."""

from __future__ import annotations

import textwrap
from importlib import metadata
from pathlib import Path

TORCH = metadata.version("torch")
MATCHING = TORCH.partition("+")[0] + ".post3"

NO_LIBRARY = "raise OSError('{library}: cannot open shared object file: No such file or directory')"
NO_DEVICE = """
import types
import torch
npu = torch.npu = types.SimpleNamespace(is_available=lambda: False, device_count=lambda: 0)
"""
WORKS = """
import types
import torch
npu = torch.npu = types.SimpleNamespace(
    is_available=lambda: True, device_count=lambda: 2, get_device_name=lambda device=None: "Ascend910B2",
    default_generators=("of npu 0", "of npu 1"), _lazy_call=lambda call: call(),
)
torch.distributed.is_hccl_available = lambda: True
"""

ABORTS = "import os, sys\nprint('the runtime is not pleased', file=sys.stderr, flush=True)\nos.abort()"
HANGS = "import time\ntime.sleep(600)"


def torch_npu(
    folder: Path,
    body: str,
    *,
    version: str = MATCHING,
    installed: bool = True,
    autoload: bool = False,
    transfer: str = "",
) -> Path:
    """Write such a package into `folder` and return that.

    installed: with the metadata of a wheel. autoload: named as a device extension, so that `import torch` loads it.
    transfer: the body of its transfer_to_npu.
    """
    package = folder / "torch_npu"
    (package / "contrib").mkdir(parents=True)
    text = f"__version__ = {version!r}\n{textwrap.dedent(body)}\n\ndef _autoload(): pass\n"
    (package / "__init__.py").write_text(text)
    (package / "contrib" / "__init__.py").write_text("")
    (package / "contrib" / "transfer_to_npu.py").write_text(transfer)
    if installed:
        data = folder / f"torch_npu-{version}.dist-info"
        data.mkdir()
        (data / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {version}\n")
        if autoload:
            (data / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    return folder
