"""Ascend NPU device by torch_npu and its `transfer_to_npu`; untested on hardware."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from . import DeviceError, npu_trouble
from .npu_trouble import NpuDiagnosis

if TYPE_CHECKING:
    from .redirect import Redirects

name = "npu"
distributed_backend = "hccl"


def available() -> list[str]:
    """Why the NPU cannot be used. Imports torch_npu only if it is installed for this torch."""
    found = trouble()
    return [] if found is None else [str(found)]


def trouble() -> NpuDiagnosis | None:
    """Diagnose unusable NPUs, or return None. Opens no device."""
    found = npu_trouble.before_import()
    if found is not None:
        return found
    try:
        # torch first, since it may load torch_npu itself.
        importlib.import_module("torch")
        importlib.import_module("torch_npu")
    except (Exception, SystemExit) as error:  # missing CANN libraries: ImportError, OSError; torch_npu may also exit
        return npu_trouble.of_import(error)
    found = npu_trouble.pair(str(getattr(sys.modules["torch_npu"], "__version__", "")), npu_trouble.torch_version())
    if found is not None:
        return found
    try:
        there = bool(_npu().is_available())
    except Exception as error:
        return npu_trouble.of_opening(error)
    return None if there else npu_trouble.of_devices()


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
