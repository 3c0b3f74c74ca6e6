"""mindspeed_lite: a non-invasive accelerator for Megatron-LM.

With Megatron's training script: `import mindspeed_lite.megatron_adaptor` at its top, and choose features by flag.
With Megatron-core alone, features are keyword arguments:

    import mindspeed_lite

    mindspeed_lite.enable(use_fused_rmsnorm=True, use_flash_attn=True)
    print(mindspeed_lite.report().to_text())
    mindspeed_lite.disable()

    with mindspeed_lite.enabled(auto=True):
        model = build_model()
"""

from __future__ import annotations

import contextlib
import os as _os
import sys as _sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed_lite._version import __version__

if TYPE_CHECKING:
    from mindspeed_lite.engine import Report

__all__ = ["__version__", "disable", "enable", "enabled", "report"]

# From a checkout that is not installed, `mindspeed_lite.patches` lies beside this package, not in it.
_root = _os.path.dirname(_os.path.dirname(_os.path.abspath(__file__)))
if all(_os.path.isfile(_os.path.join(_root, *parts)) for parts in (("setup.py",), ("patches", "__init__.py"))):
    __path__.append(_root)


def enable(*, host_args: Any = None, **flags: Any) -> Report:
    """Swap in the features named by keyword, on top of those in force; all or none.

    Args:
        host_args: a namespace, dataclass or mapping in which the features' conditions find the model's arguments
            under Megatron's names (`transformer_impl`, `normalization`, ...); without it nothing is assumed.
        **flags: flags with underscores and without dashes (`use_flash_attn=True`), and `auto`, `strict`,
            `allow_unverified`.

    Returns:
        The report of this call.

    Raises:
        mindspeed_lite.engine.EngineError: an unknown flag or value, a conflict, a target that does not exist.
        mindspeed_lite.platform.DeviceError: the requested device cannot be used.
    """
    from mindspeed_lite import activation

    return activation.full_report(activation.activate_by_keyword(flags, host_args))


def disable() -> list[str]:
    """Take everything back: features, the flags in Megatron's parser, the device layer.

    Returns:
        What was left in place because someone else has changed it since; usually nothing.
    """
    from mindspeed_lite import activation, platform

    left = activation.deactivate()
    adaptor = _sys.modules.get("mindspeed_lite.megatron_adaptor")
    if adaptor is not None:
        adaptor.remove()
    platform.deactivate()
    return left


@contextlib.contextmanager
def enabled(*, host_args: Any = None, **flags: Any) -> Iterator[Report]:
    """`enable` for a block; what was in force before it stays in force after it."""
    from mindspeed_lite import activation, platform

    had_device = platform.current() is not None
    active = activation.activate_by_keyword(flags, host_args)
    try:
        yield activation.full_report(active)
    finally:
        activation.deactivate(active)
        if not had_device:
            platform.deactivate()


def report() -> Report | None:
    """What is in force now, or None: features, targets, backends, reasons, fallbacks so far."""
    from mindspeed_lite import activation

    active = activation.current()
    return None if active is None else activation.full_report(active)
