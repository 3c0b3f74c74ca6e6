"""Ascend NPU device, through torch_npu and its own `transfer_to_npu`. This project's tests have no device."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from . import npu_trouble
from .base import DeviceError
from .npu_trouble import NpuDiagnosis
from .redirect import Redirects

name = "npu"
distributed_backend = "hccl"


def available() -> list[str]:
    """Why the NPU cannot be used. Imports torch_npu only if it is installed for this torch."""
    found = trouble()
    return [] if found is None else [str(found)]


def trouble() -> NpuDiagnosis | None:
    """Diagnose why NPUs cannot be used, or return None. Opens no device."""
    found = npu_trouble.before_import()
    if found is not None:
        return found
    try:
        # torch first, since it may load torch_npu itself.
        importlib.import_module("torch")
        importlib.import_module("torch_npu")
    except (Exception, SystemExit) as error:  # missing CANN libraries: ImportError, OSError; once torch_npu exited
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
    """Name and number of the visible NPUs."""
    return f"{_npu().device_count()} x {_npu().get_device_name(0)}"


def _npu() -> Any:
    return importlib.import_module("torch").npu  # torch_npu adds it


def install(redirects: Redirects) -> None:
    """Load torch_npu's irreversible mapping from `torch.cuda` to `torch.npu`, and complete it for Megatron."""
    try:
        importlib.import_module("torch_npu.contrib.transfer_to_npu")
    except ImportError as error:
        raise DeviceError(
            f"Device npu: torch_npu.contrib.transfer_to_npu does not import ({error}); install the torch_npu "
            "release that matches your torch"
        ) from error
    # This file must not import torch, which may load torch_npu itself.
    importlib.import_module(f"{__package__}.npu_unmapped").install(redirects)
