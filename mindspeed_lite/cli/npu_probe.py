"""Examines torch_npu in a separate process, which may abort or hang."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from mindspeed_lite.bench import isolated
from mindspeed_lite.platform import npu, npu_trouble
from mindspeed_lite.platform.npu_trouble import NpuDiagnosis

SECONDS = 60.0
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


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
    facts: dict[str, Any] = {}
    doing = "starting Python"
    try:
        for found in isolated.messages(npu.examine, seconds):
            facts |= found
            doing = facts.pop("doing", doing)
    except isolated.ProcessEnded as error:
        trouble = _of_ending(doing, error, seconds)
    trouble = facts.pop("trouble", trouble)
    return Probe(trouble, trouble is not None and doing == npu.IMPORTING_TORCH, facts)


def _of_ending(doing: str, error: isolated.ProcessEnded, seconds: float) -> NpuDiagnosis:
    if error.code is None:
        return NpuDiagnosis(
            f"{doing} does not end (given up after {seconds:g} s)",
            "look at `npu-smi info` for a device or driver that hangs; `doctor --timeout` waits longer",
        )
    words = re.compile(r"error|what\(\)|terminate|fatal|assert", re.IGNORECASE)
    telling = next(filter(words.search, error.printed), error.printed[-1] if error.printed else "")
    return NpuDiagnosis(
        f"{doing} ends the process ({error.ending}){': ' * bool(telling)}{telling[:200]}",
        "torch_npu, CANN and the driver do not fit each other or this torch: install a matching set; "
        "`python -c 'import torch_npu'` shows it",
    )


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
