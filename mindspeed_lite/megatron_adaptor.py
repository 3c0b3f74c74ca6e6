"""Import this at the top of a Megatron training script; choose features by flag.

Activates the device layer and installs argument hooks; imports nothing of Megatron and enables no feature.
`MINDSPEED_LITE_DISABLE=1` disables it.
"""

from __future__ import annotations

from mindspeed_lite import error_exit

DISABLE_VARIABLE = "MINDSPEED_LITE_DISABLE"


def install() -> None:
    """Install device layer and argument hooks; idempotent. Raises DeviceError."""
    error_exit.install()
    from mindspeed_lite import platform, startup

    platform.activate()
    startup.install()


def remove() -> None:
    from mindspeed_lite import startup

    startup.remove()
    error_exit.remove()


def disabled() -> bool:
    return error_exit.is_set(DISABLE_VARIABLE)


if not disabled():
    install()
