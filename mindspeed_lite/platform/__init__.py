"""Device layer: chooses the training device and redirects `torch.cuda` to it.

Order: NPU, CUDA, CPU; `MINDSPEED_LITE_DEVICE` overrides it.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from .redirect import Redirects

__all__ = ["Device", "DeviceError", "activate", "choose", "current", "deactivate", "device_names"]

DEVICE_VARIABLE = "MINDSPEED_LITE_DEVICE"

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

_log = logging.getLogger("mindspeed_lite")


class DeviceError(RuntimeError):
    """The requested device cannot be used; the text says why and what to do."""


class Device(Protocol):
    """A device kind, implemented by modules `cpu`, `cuda` and `npu`."""

    name: str
    distributed_backend: str

    def available(self) -> list[str]:
        """Reasons why it cannot be used."""

    def describe(self) -> str: ...

    def install(self, redirects: Redirects) -> None: ...


_active: tuple[Device, Redirects] | None = None


def device_names() -> tuple[str, ...]:
    return ("npu", "cuda", "cpu")


def device(name: str) -> Device:
    return cast(Device, importlib.import_module(f"{__name__}.{name}"))


def choice(variable: str, choices: Sequence[str], given: str | None = None, flag: str = "") -> str:
    """`given` by `flag`, else the variable's value, else the first choice. Raises DeviceError."""
    value = given if given is not None else os.environ.get(variable) or choices[0]
    if value not in choices:
        where = f"{variable}=" if given is None else f"{flag} "
        raise DeviceError(f"{where}{value} is not known; choose {' or '.join(choices)}")
    return value


def choose(requested: str | None = None) -> Device:
    """Return `requested`, else `MINDSPEED_LITE_DEVICE`, else the first device. Raises DeviceError."""
    wanted = requested or os.environ.get(DEVICE_VARIABLE) or "auto"
    asked = f"Device {wanted!r}" if requested else f"{DEVICE_VARIABLE}={wanted!r}"
    if wanted not in ("auto", *device_names()):
        raise DeviceError(f"{asked} does not name a device; choose one of {', '.join(('auto', *device_names()))}")
    if wanted != "auto":
        chosen = device(wanted)
        if reasons := chosen.available():
            raise DeviceError(f"{asked} cannot be used: {'; '.join(reasons)}")
        return chosen
    if importlib.util.find_spec("torch_npu") is None:
        reasons = []
    elif not (reasons := device("npu").available()):
        return device("npu")
    chosen = device("cpu") if device("cuda").available() else device("cuda")
    if reasons:
        _log.warning("%s is used, because %s", chosen.name, "; ".join(reasons))
    return chosen


def activate(requested: str | None = None) -> Device:
    """Choose and install a device; repeated calls return the active one.

    Raises DeviceError as `choose`, if another is active, or if a variable has a wrong value.
    """
    global _active
    check_launcher()
    if _active is not None:
        if requested not in (None, "auto", _active[0].name):
            raise DeviceError(
                f"Device {requested} was asked for but {_active[0].name} is already active in this process"
            )
        return _active[0]
    chosen = choose(requested)
    from . import binding, megatron
    from .redirect import Redirects

    redirects = Redirects()
    try:
        chosen.install(redirects)
        megatron.attach(chosen.name)
        if line := binding.bind(chosen.name):
            print(f"mindspeed_lite: {line}", flush=True)
    except BaseException:
        binding.unbind()
        megatron.detach()
        redirects.close()
        raise
    _active = chosen, redirects
    return chosen


def check_launcher() -> None:
    for name in _LAUNCHER_VARIABLES:
        value = os.environ.get(name, "0")
        try:
            int(value)
        except ValueError:
            raise DeviceError(
                f"{name}={value!r} is not a number: start the training with a launcher, such as torchrun, which sets "
                "it, or unset it for one process."
            ) from None


def deactivate() -> None:
    """Undo the device layer, except torch_npu's own mapping."""
    global _active
    if _active is None:
        return
    from . import binding, megatron

    binding.unbind()
    megatron.detach()
    _active[1].close()
    _active = None


def current() -> Device | None:
    return None if _active is None else _active[0]
