"""Examines torch_npu in a separate process, which may abort or hang."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from mindspeed_lite.child_process import child_process
from mindspeed_lite.platform import npu, npu_trouble
from mindspeed_lite.platform.npu_trouble import NpuDiagnosis

SECONDS = 60.0
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
# Before a finding, among what torch_npu prints.
_MARK = "mindspeed_lite: "


class Probe(NamedTuple):
    """Result of the probe. breaks_torch: importing torch fails, because it loads torch_npu.

    facts: as far as known, those of `npu.examine`.
    """

    trouble: NpuDiagnosis | None
    breaks_torch: bool
    facts: dict[str, Any]


def ask(seconds: float = SECONDS) -> Probe:
    trouble = npu_trouble.before_import()
    if trouble is not None:
        return Probe(trouble, False, {})
    # A file, since a pipe could block.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        with child_process(
            [sys.executable, "-m", __name__], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        ) as child:
            try:
                code: int | None = child.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
        output.seek(0)
        lines = [line.strip() for line in output if line.strip()]
    facts: dict[str, Any] = {"doing": "starting Python"}
    for line in lines:
        facts |= json.loads(line.removeprefix(_MARK)) if line.startswith(_MARK) else {}
    doing = facts.pop("doing")
    if "trouble" in facts:
        trouble = NpuDiagnosis(*facts.pop("trouble"))
    elif code is None:
        trouble = NpuDiagnosis(
            f"{doing} does not end (given up after {seconds:g} s)",
            "look at `npu-smi info` for a device or driver that hangs; `doctor --timeout` waits longer",
        )
    elif code != 0 or "transfer" not in facts:
        ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        printed = [line for line in lines if not line.startswith(_MARK)]
        words = re.compile(r"error|what\(\)|terminate|fatal|assert", re.IGNORECASE)
        telling = next(filter(words.search, printed), printed[-1] if printed else "")
        trouble = NpuDiagnosis(
            f"{doing} ends the process ({ending}){': ' * bool(telling)}{telling[:200]}",
            "torch_npu, CANN and the driver do not fit each other or this torch: install a matching set; "
            "`python -c 'import torch_npu'` shows it",
        )
    return Probe(trouble, trouble is not None and doing == npu.IMPORTING_TORCH, facts)


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


if __name__ == "__main__":
    for finding in npu.examine():
        print(f"\n{_MARK}{json.dumps(finding)}", flush=True)
