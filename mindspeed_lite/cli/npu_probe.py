"""Asks torch_npu what it finds, in a process of its own: one that aborts or hangs there costs a line, not the doctor.

`ask` is the doctor's side. The other is this module run with the name of a file, into which it writes a line of JSON
before each thing it does and one for each thing it has found: the last of them says where a process ended.
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
    """What was found.

    trouble: what keeps NPUs from being used; None where nothing does. breaks_torch: whether `import torch` fails
    with it, since torch loads torch_npu. facts, where it got so far: version, cann, count, name, transfer (why
    transfer_to_npu does not import, or ""), hccl, backends (operator -> backend and reasons).
    """

    trouble: NpuDiagnosis | None
    breaks_torch: bool = False
    facts: dict[str, Any] = field(default_factory=dict)


def ask(seconds: float = SECONDS) -> Probe:
    """What torch_npu finds here; starts no process where it is plain that nothing can be found."""
    trouble = npu_trouble.before_import()
    if trouble is not None:
        return Probe(trouble)
    with tempfile.TemporaryDirectory(prefix="mindspeed-lite-") as folder:
        told, said = Path(folder, "told"), Path(folder, "said")
        told.touch()
        code = _run(told, said, seconds)
        lines = [json.loads(line) for line in told.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        text = said.read_text(encoding="utf-8", errors="replace")
    facts: dict[str, Any] = {}
    for line in lines:
        facts |= line.get("found", {})
    doing = next((line["doing"] for line in reversed(lines) if "doing" in line), "starting Python")
    if "trouble" in facts:
        trouble = NpuDiagnosis(*facts.pop("trouble"))
    elif code is None:
        trouble = NpuDiagnosis(
            f"{doing} does not end (given up after {seconds:g} s)",
            "look at `npu-smi info` for a device or driver that hangs; `doctor --timeout` waits longer",
        )
    elif code != 0 or "backends" not in facts:
        trouble = NpuDiagnosis(
            f"{doing} ends the process ({_ending(code)}){_last_words(text)}",
            "torch_npu, CANN and the driver do not fit each other or this torch: install a matching set; "
            "`python -c 'import torch_npu'` shows it",
        )
    return Probe(trouble, breaks_torch=trouble is not None and doing == _TORCH, facts=facts)


@contextmanager
def without_autoload() -> Iterator[None]:
    """Within the block `import torch` loads no device extension."""
    before = os.environ.get(AUTOLOAD)
    os.environ[AUTOLOAD] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[AUTOLOAD]
        else:
            os.environ[AUTOLOAD] = before


def _run(told: Path, said: Path, seconds: float) -> int | None:
    """The exit code of the other side, or None after it was stopped; what it prints goes to `said`."""
    command = [sys.executable, "-m", __name__, str(told)]
    with (
        # A file, so that no pipe is waited for.
        open(said, "wb") as output,
        child_process(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT) as child,
    ):
        try:
            return child.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _last_words(text: str) -> str:
    """The line that says what happened, among those of a stack; else the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"error|what\(\)|terminate|fatal|assert", line, re.IGNORECASE)]
    return f": {(telling or lines[-1:])[0][:200]}" if lines else ""


def main(path: str) -> int:
    """The other side."""
    with open(path, "a", encoding="utf-8") as file:

        def tell(**entry: Any) -> None:
            file.write(json.dumps(entry) + "\n")
            file.flush()

        tell(doing=_TORCH)
        try:
            importlib.import_module("torch")
        except (Exception, SystemExit) as error:
            tell(found={"trouble": npu_trouble.of_import(error)})
            return 0
        tell(doing="importing torch_npu and asking it for devices")
        from mindspeed_lite.platform import npu

        trouble = npu.trouble()
        version = str(getattr(sys.modules.get("torch_npu"), "__version__", ""))
        tell(found={"version": version or npu_trouble.torch_npu_version(), "cann": npu_trouble.cann_version()})
        if trouble is not None:
            tell(found={"trouble": trouble})
            return 0
        _look(tell)
    return 0


def _look(tell: Any) -> None:
    """What there is to say about devices that are there."""
    torch: Any = importlib.import_module("torch")
    tell(doing="asking for the name of an NPU")
    try:
        tell(found={"count": int(torch.npu.device_count()), "name": str(torch.npu.get_device_name(0))})
    except Exception as error:
        tell(found={"trouble": npu_trouble.of_opening(error)})
        return
    tell(doing="asking torch_npu for HCCL")
    there = getattr(torch.distributed, "is_hccl_available", None)
    tell(found={"hccl": bool(there()) if there else hasattr(torch.distributed, "ProcessGroupHCCL")})
    tell(doing="importing transfer_to_npu")
    try:
        importlib.import_module("torch_npu.contrib.transfer_to_npu")
        tell(found={"transfer": ""})
    except Exception as error:
        tell(found={"transfer": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"})
    tell(doing="loading the operators' NPU backends")
    from mindspeed_lite.ops import dispatch

    tell(found={"backends": {name: dispatch.selected(name, "npu") for name in dispatch.OPERATORS}})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
