"""Ascend NPU through torch_npu and its own `transfer_to_npu`.

Not run by this project's tests, which have no NPU: only selection and its error messages are covered there.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from .base import DeviceError
from .redirect import Redirects

name = "npu"
distributed_backend = "hccl"


def available() -> list[str]:
    """Why the NPU cannot be used here. Imports torch_npu only if it is installed."""
    if importlib.util.find_spec("torch_npu") is None:
        return ["torch_npu is not installed (pip install 'mindspeed-lite[npu]', matching your torch and CANN)"]
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        return [f"torch_npu is installed but does not import: {error} (is CANN's set_env.sh sourced?)"]
    if not _npu().is_available():
        return ["torch_npu finds no NPU device (driver, or ASCEND_RT_VISIBLE_DEVICES)"]
    return []


def describe() -> str:
    """Name and number of the visible NPUs."""
    return f"{_npu().device_count()} x {_npu().get_device_name(0)}"


def _npu() -> Any:
    return torch.npu  # type: ignore[attr-defined]  # torch_npu adds it


def install(redirects: Redirects) -> None:
    """Load torch_npu's own mapping from `torch.cuda` to `torch.npu`.

    It has no way back: after `deactivate` the mapping stays until the process ends.
    """
    try:
        importlib.import_module("torch_npu.contrib.transfer_to_npu")
    except ImportError as error:
        raise DeviceError(
            f"Device npu: torch_npu.contrib.transfer_to_npu does not import ({error}); install the torch_npu "
            "release that matches your torch"
        ) from error
