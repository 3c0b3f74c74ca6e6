"""The device, torch_npu, collectives, and what the device layer does about memory."""

from __future__ import annotations

import os

from mindspeed_lite import platform
from mindspeed_lite.platform import allocator, npu_trouble

from . import found
from .row import Row, note, ok, problem

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


def check_device() -> list[Row]:
    if found.torch()[0] is None:
        return [note("device", "cannot be told without torch", "see torch")]
    chosen, candidates, error = found.device()
    listed = "; ".join(f"{name}: {', '.join(reasons) or 'usable'}" for name, reasons in candidates)
    asked = os.environ.get(platform.DEVICE_VARIABLE)
    if not chosen:
        fix = f"unset {platform.DEVICE_VARIABLE}, or set it to one that is usable"
        return [problem("device", f"{error}. {listed}", fix)]
    by = f"by {platform.DEVICE_VARIABLE}" if asked and asked != "auto" else "chosen by availability"
    return [ok("device", f"{chosen} ({found.describe(chosen)}), {by}. {listed}")]


def check_npu() -> list[Row]:
    """What torch_npu finds, or what keeps it from finding anything; nothing where it is not installed."""
    version = npu_trouble.torch_npu_version()
    if not version and not found.is_there("torch_npu"):
        return []
    torch = npu_trouble.torch_version()
    if not torch:
        return [note("torch_npu", f"{version}, without torch", f"install torch {version} first")]
    mismatch = npu_trouble.pair(version, torch)
    if mismatch is not None:
        return [problem("torch_npu", *mismatch)]
    probe = found.npu()
    facts = probe.facts
    version = facts.get("version") or version
    mismatch = npu_trouble.pair(version, torch)
    if mismatch is not None:
        return [problem("torch_npu", *mismatch)]
    text = f"{version or 'unknown version'} for torch {torch}"
    if facts.get("cann"):
        text += f", CANN {facts['cann']}"
    if probe.trouble is not None:
        # No problem of its own: where the NPU is asked for, the device is one; elsewhere training can start.
        return [note("torch_npu", f"{text}: {probe.trouble.what}", probe.trouble.fix)]
    if facts["transfer"]:
        fix = "install the torch_npu release that matches your torch"
        return [problem("torch_npu", f"{text}: transfer_to_npu does not import: {facts['transfer']}", fix)]
    text += f", {facts['count']} x {facts['name']}, transfer_to_npu imports, HCCL {_there(facts['hccl'])}"
    return [ok("torch_npu", text)]


def _there(is_there: bool) -> str:
    return "there" if is_there else "absent"


def check_collectives() -> list[Row]:
    torch, _ = found.torch()
    if torch is None:
        return [note("collectives", "cannot be told without torch", "see torch")]
    distributed = torch.distributed
    if not distributed.is_available():
        return [problem("collectives", "torch is built without torch.distributed", "install torch from PyPI")]
    there = {
        "gloo": distributed.is_gloo_available(),
        "nccl": distributed.is_nccl_available(),
        "hccl": bool(dict(found.device()[1])["npu"] == [] and found.npu().facts.get("hccl")),
    }
    needed = _BACKENDS[found.device_name()]
    text = ", ".join(f"{name} {_there(each)}" for name, each in there.items())
    if not there[needed]:
        fix = f"install a torch (for hccl: torch_npu) built with {needed}"
        return [problem("collectives", f"{text}; the {found.device_name()} device needs {needed}", fix)]
    return [ok("collectives", f"{text}; {needed} serves the {found.device_name()} device")]


def check_allocator() -> list[Row]:
    try:
        choice = allocator.wanted()
    except ValueError as error:
        fix = f"unset it, or set it to {allocator.KEEP} or {allocator.SYSTEM}"
        return [problem("allocator", str(error), fix)]
    if choice == allocator.SYSTEM:
        return [ok("allocator", f"system, by {allocator.ALLOCATOR_VARIABLE}: freed memory goes back at once")]
    if found.device_name() != "cpu":
        return [ok("allocator", f"not touched: the device is {found.device_name()}")]
    reasons = allocator.why_not()
    if reasons:
        return [note("allocator", f"`mindspeed-lite run` cannot keep freed memory: {'; '.join(reasons)}")]
    return [ok("allocator", "keep: `mindspeed-lite run` keeps freed memory for the next tensor")]
