"""Import this at the top of a Megatron training script; choose features by flag.

    import mindspeed_lite.megatron_adaptor

The line may stand before or after torch's and Megatron's own imports. It activates the device layer and installs
argument hooks and `error_exit`; nothing of Megatron is imported, and without a flag no feature is on.
`MINDSPEED_LITE_DISABLE=1` makes it do nothing.
"""

from __future__ import annotations

from mindspeed_lite import error_exit

DISABLE_VARIABLE = "MINDSPEED_LITE_DISABLE"


def install() -> None:
    """Install the device layer and the argument hooks; a second call changes nothing.

    Raises:
        mindspeed_lite.platform.DeviceError: MINDSPEED_LITE_DEVICE names a device that cannot be used.
    """
    error_exit.install()
    from mindspeed_lite import platform, startup

    platform.activate()
    startup.install()


def remove() -> None:
    """Take the argument hooks back; `mindspeed_lite.disable()` undoes everything."""
    from mindspeed_lite import startup

    startup.remove()
    error_exit.remove()


def disabled() -> bool:
    """Whether the environment asks for this import to do nothing."""
    return error_exit.is_set(DISABLE_VARIABLE)


if not disabled():
    install()
