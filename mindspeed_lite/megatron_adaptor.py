"""Import this at the top of a Megatron training script; choose features by flag.

    import mindspeed_lite.megatron_adaptor

The device layer is chosen and our flags wait for Megatron's argument parser. Nothing of Megatron is imported here,
and without a flag none of it changes. An error of this package ends the script in one line (`error_exit`). The line
may stand before or after torch's and Megatron's own imports.
`MINDSPEED_LITE_DISABLE=1` makes it do nothing.
"""

from __future__ import annotations

import os

DISABLE_VARIABLE = "MINDSPEED_LITE_DISABLE"


def install() -> None:
    """Install the device layer and the argument hooks; again is no change.

    Raises:
        mindspeed_lite.platform.DeviceError: MINDSPEED_LITE_DEVICE names a device that cannot be used.
    """
    from mindspeed_lite import error_exit

    error_exit.install()
    from mindspeed_lite import platform
    from mindspeed_lite.patches._shared import arguments

    platform.activate()
    arguments.install()


def remove() -> None:
    """Take the argument hooks back; `mindspeed_lite.disable()` takes back everything."""
    from mindspeed_lite import error_exit
    from mindspeed_lite.patches._shared import arguments

    arguments.remove()
    error_exit.remove()


def disabled() -> bool:
    """Whether the environment asks for this import to do nothing."""
    return os.environ.get(DISABLE_VARIABLE, "").strip().lower() not in ("", "0", "false", "no", "off")


if not disabled():
    install()
