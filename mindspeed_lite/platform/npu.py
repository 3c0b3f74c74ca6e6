"""Ascend NPU device by torch_npu and its `transfer_to_npu`; untested on hardware."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from . import DeviceError, npu_trouble
from .npu_trouble import NpuDiagnosis

if TYPE_CHECKING:
    from .redirect import Redirects

name = "npu"
distributed_backend = "hccl"

IMPORTING_TORCH = "importing torch"
_OPENING = "asking for the name of an NPU"


def available() -> list[str]:
    """Why the NPU cannot be used. Imports torch_npu only if it is installed for this torch."""
    found = trouble()
    return [] if found is None else [str(found)]


def trouble() -> NpuDiagnosis | None:
    """Diagnose unusable NPUs, or return None. Opens no device."""
    steps = itertools.takewhile(lambda each: each.get("doing") != _OPENING, examine())
    return next((each["trouble"] for each in steps if "trouble" in each), None)


def examine() -> Iterator[dict[str, Any]]:
    """Findings, step by step: `doing` names the step that begins, `trouble` ends them.

    Facts: version, cann, count, name, hccl, transfer (why transfer_to_npu does not import, or "").
    """
    if found := npu_trouble.before_import():
        yield {"trouble": found}
        return
    diagnose = npu_trouble.of_import
    try:
        yield {"doing": IMPORTING_TORCH}
        torch: Any = importlib.import_module("torch")  # first, since it may load torch_npu itself
        yield {"doing": "importing torch_npu and asking it for devices"}
        torch_npu = importlib.import_module("torch_npu")
        version = str(getattr(torch_npu, "__version__", ""))
        yield {"version": version or npu_trouble.torch_npu_version(), "cann": npu_trouble.cann_version()}
        diagnose = npu_trouble.of_opening
        if found := npu_trouble.pair(version, npu_trouble.torch_version()):
            yield {"trouble": found}
        elif not torch.npu.is_available():
            yield {"trouble": npu_trouble.of_devices()}
        else:
            yield {"doing": _OPENING}
            yield {"count": int(torch.npu.device_count()), "name": str(torch.npu.get_device_name(0))}
            yield {"doing": "asking torch_npu for HCCL"}
            there = getattr(torch.distributed, "is_hccl_available", None)
            yield {"hccl": bool(there()) if there else hasattr(torch.distributed, "ProcessGroupHCCL")}
            yield {"doing": "importing transfer_to_npu"}
            yield {"transfer": _transfer_problem()}
    except (Exception, SystemExit) as error:  # missing CANN libraries: ImportError, OSError; torch_npu may also exit
        yield {"trouble": diagnose(error)}


def _transfer_problem() -> str:
    try:
        importlib.import_module("torch_npu.contrib.transfer_to_npu")
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def describe() -> str:
    return f"{_npu().device_count()} x {_npu().get_device_name(0)}"


def _npu() -> Any:
    return importlib.import_module("torch").npu


def install(redirects: Redirects) -> None:
    """Load torch_npu's irreversible `torch.cuda` mapping, and complete it for Megatron."""
    try:
        importlib.import_module("torch_npu.contrib.transfer_to_npu")
    except ImportError as error:
        raise DeviceError(
            f"Device npu: torch_npu.contrib.transfer_to_npu does not import ({error}); install the torch_npu "
            "release that matches your torch"
        ) from error
    # This file must not import torch, which may load torch_npu.
    importlib.import_module(f"{__package__}.npu_unmapped").install(redirects)
