"""What several checks ask about, found once: torch, what torch_npu says, the device, the Megatron of this process.

torch_npu is never imported here, where its end would be the doctor's: see `npu_probe`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_lite import platform
from mindspeed_lite.cli import npu_probe
from mindspeed_lite.platform import npu_trouble

from .row import said

series = npu_trouble.series

# How long torch_npu may take; the doctor's --timeout.
npu_seconds = npu_probe.SECONDS


def is_there(module: str) -> bool:
    """Whether a module can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a parent that is broken, or a stub without a spec
        return False


@functools.cache
def torch() -> tuple[Any, str]:
    """torch without its device extensions, or None and why it does not import."""
    try:
        with npu_probe.without_autoload():
            return importlib.import_module("torch"), ""
    except Exception as error:
        return None, said(error)


@functools.cache
def npu() -> npu_probe.Probe:
    """What torch_npu says."""
    return npu_probe.ask(npu_seconds)


@functools.cache
def device() -> tuple[str, list[tuple[str, list[str]]], str]:
    """The device a run would choose or "", every candidate with its reasons, and the error or ""."""
    candidates = [(name, _reasons(name)) for name in platform.device_names()]
    asked = os.environ.get(platform.DEVICE_VARIABLE) or "auto"
    if asked != "auto" and asked not in dict(candidates):
        return "", candidates, f"{platform.DEVICE_VARIABLE}={asked!r} is not a device"
    for name, reasons in candidates:
        if asked in ("auto", name) and not reasons:
            return name, candidates, ""
    return "", candidates, f"{platform.DEVICE_VARIABLE}={asked} asks for a device that cannot be used"


def _reasons(name: str) -> list[str]:
    try:
        if name == "npu":
            trouble = npu().trouble
            return [] if trouble is None else [str(trouble)]
        return platform.device(name).available()
    except Exception as error:
        return [f"its check failed: {said(error)}"]


def device_name() -> str:
    """The chosen device, or where torch cannot say, the one that is always there."""
    return (device()[0] if torch()[0] is not None else "") or "cpu"


def describe(name: str) -> str:
    """Which hardware a device is."""
    if name == "npu":
        facts = npu().facts
        return f"{facts['count']} x {facts['name']}"
    return platform.device(name).describe()


@dataclass(frozen=True)
class Host:
    """The Megatron an import would find: version and folder of `core`, folder of `training`."""

    version: str
    core: Path
    training: Path | None


@functools.cache
def host() -> Host | None:
    """Megatron, read and not imported."""
    spec = importlib.util.find_spec("megatron")
    folders = [Path(each) for each in (spec.submodule_search_locations or ())] if spec is not None else []

    def holder(name: str) -> Path | None:
        return next((each / name for each in folders if (each / name / "__init__.py").is_file()), None)

    core = holder("core")
    if core is None or not (core / "package_info.py").is_file():
        return None
    version = str(runpy.run_path(str(core / "package_info.py"))["__version__"])
    return Host(version, core, holder("training"))


def forget() -> None:
    """Look again at the next question."""
    for each in (torch, npu, device, host):
        each.cache_clear()
