"""Device, versions and settings of this process for the report."""

from __future__ import annotations

import contextlib
import os
import platform as python_platform
from importlib import metadata
from typing import Any

import torch

from mindspeed_lite._version import __version__
from mindspeed_lite.platform import Device, allocator, megatron

_PACKAGES = ("triton", "torch-npu", "liger-kernel", "flash-attn", "transformer-engine")
_PREFIXES = (
    "OMP_", "KMP_", "MKL_", "MALLOC_", "LD_PRELOAD", "GLIBC_TUNABLES", "TORCH", "PYTORCH_", "NCCL_", "GLOO_", "CUDA_",
    "ASCEND_", "MINDSPEED_LITE_",
)  # fmt: skip
# Prefixes and suffixes of variables that differ by run or are paths.
_NOT = (("TORCHELASTIC_", "MINDSPEED_LITE_BENCH"), ("_DIR", "_PATH", "_HOME"))


def describe(device: Device) -> dict[str, Any]:
    names = [name for name in sorted(os.environ) if name.startswith(_PREFIXES)]
    return {
        "device": device.describe(),
        "device_type": device.name,
        "versions": _versions(device),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "threads": torch.get_num_threads(),
        "affinity": _affinity(),
        "allocator": _allocator(device),
        "variables": {
            name: os.environ[name] for name in names if not (name.startswith(_NOT[0]) or name.endswith(_NOT[1]))
        },
    }


def _affinity() -> str:
    with contextlib.suppress(OSError), open("/proc/self/status") as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("Cpus_allowed_list")), "")
    return ""


def _versions(device: Device) -> dict[str, str]:
    found = {
        "mindspeed_lite": __version__,
        "torch": str(torch.__version__),
        megatron.HOST: megatron.version(),
        "python": python_platform.python_version(),
        "cuda": torch.version.cuda if device.name == "cuda" else None,
    }
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return {name: version for name, version in found.items() if version}


def _allocator(device: Device) -> str:
    if device.name != "cpu":
        return "PyTorch's caching allocator"
    keeps = "glibc, keeping what is freed (as mindspeed-lite run does)"
    return keeps if allocator.keeps() else "the system's"
