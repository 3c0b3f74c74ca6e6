"""Probes torch_npu in a separate process, which may abort or hang.

The process writes JSON lines: its current action and its findings.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_lite.child_process import child_process
from mindspeed_lite.platform import npu_trouble
from mindspeed_lite.platform.npu_trouble import NpuDiagnosis

SECONDS = 60.0
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"

_TORCH = "importing torch"


@dataclass(frozen=True)
class Probe:
    """Findings about torch_npu.

    trouble: why NPUs cannot be used, or None. breaks_torch: torch loads torch_npu, so its import fails. facts, as far
    as known: version, cann, count, name, transfer (why transfer_to_npu does not import, or ""), hccl.
    """

    trouble: NpuDiagnosis | None
    breaks_torch: bool = False
    facts: dict[str, Any] = field(default_factory=dict)


def ask(seconds: float = SECONDS) -> Probe:
    trouble = npu_trouble.before_import()
    if trouble is not None:
        return Probe(trouble)
    with tempfile.TemporaryDirectory(prefix="mindspeed-lite-") as folder:
        found, printed = Path(folder, "found"), Path(folder, "printed")
        found.touch()
        # Output goes to a file, so that no pipe can block.
        with (
            printed.open("wb") as output,
            child_process([sys.executable, "-m", __name__, str(found)], stdin=subprocess.DEVNULL, stdout=output,
                          stderr=subprocess.STDOUT) as child,
        ):  # fmt: skip
            try:
                code: int | None = child.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
        facts: dict[str, Any] = {"doing": "starting Python"}
        for line in found.read_text(encoding="utf-8").splitlines():
            facts |= json.loads(line) if line.endswith("}") else {}
        lines = [line.strip() for line in printed.read_text("utf-8", "replace").splitlines() if line.strip()]
    doing = facts.pop("doing")
    if "trouble" in facts:
        trouble = NpuDiagnosis(*facts.pop("trouble"))
    elif code is None:
        trouble = NpuDiagnosis(
            f"{doing} does not end (given up after {seconds:g} s)",
            "look at `npu-smi info` for a device or driver that hangs; `doctor --timeout` waits longer",
        )
    elif code != 0 or "transfer" not in facts:
        telling = [line for line in lines if re.search(r"error|what\(\)|terminate|fatal|assert", line, re.IGNORECASE)]
        ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        trouble = NpuDiagnosis(
            f"{doing} ends the process ({ending}){': ' if lines else ''}{''.join([*telling, *lines[-1:]][:1])[:200]}",
            "torch_npu, CANN and the driver do not fit each other or this torch: install a matching set; "
            "`python -c 'import torch_npu'` shows it",
        )
    return Probe(trouble, breaks_torch=trouble is not None and doing == _TORCH, facts=facts)


@contextmanager
def without_autoload() -> Iterator[None]:
    before = os.environ.get(AUTOLOAD)
    os.environ[AUTOLOAD] = "0"
    try:
        yield
    finally:
        del os.environ[AUTOLOAD]
        if before is not None:
            os.environ[AUTOLOAD] = before


def _entries() -> Iterator[dict[str, Any]]:
    yield {"doing": _TORCH}
    try:
        torch: Any = importlib.import_module("torch")
    except (Exception, SystemExit) as error:
        yield {"trouble": npu_trouble.of_import(error)}
        return
    yield {"doing": "importing torch_npu and asking it for devices"}
    from mindspeed_lite.platform import npu

    trouble = npu.trouble()
    version = str(getattr(sys.modules.get("torch_npu"), "__version__", ""))
    yield {"version": version or npu_trouble.torch_npu_version(), "cann": npu_trouble.cann_version()}
    if trouble is not None:
        yield {"trouble": trouble}
        return
    yield {"doing": "asking for the name of an NPU"}
    try:
        yield {"count": int(torch.npu.device_count()), "name": str(torch.npu.get_device_name(0))}
    except Exception as error:
        yield {"trouble": npu_trouble.of_opening(error)}
        return
    yield {"doing": "asking torch_npu for HCCL"}
    there = getattr(torch.distributed, "is_hccl_available", None)
    yield {"hccl": bool(there()) if there else hasattr(torch.distributed, "ProcessGroupHCCL")}
    yield {"doing": "importing transfer_to_npu"}
    try:
        importlib.import_module("torch_npu.contrib.transfer_to_npu")
        yield {"transfer": ""}
    except Exception as error:
        yield {"transfer": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


if __name__ == "__main__":
    with open(sys.argv[1], "a", encoding="utf-8") as file:
        for entry in _entries():
            file.write(json.dumps(entry) + "\n")
            file.flush()
