"""mindspeed_lite: a non-invasive accelerator for Megatron-LM.

Scripts: `import mindspeed_lite.megatron_adaptor` first, and choose features by flag. Megatron-core alone:
`mindspeed_lite.enable(use_flash_attn=True)` before the model is built, or the context `enabled`; then `report()` and
`disable()`.
"""

from __future__ import annotations

import contextlib
import os as _os
import sys as _sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_lite._version import __version__

if TYPE_CHECKING:
    from mindspeed_lite.engine import Report
    from mindspeed_lite.memory.sleep import SleepReport

__all__ = ["__version__", "disable", "enable", "enabled", "report", "sleep", "wake"]


class _Patches:
    """Imports `mindspeed_lite.patches` from a checkout's folder `patches`."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        root = _os.path.dirname(_os.path.dirname(_os.path.abspath(__file__)))
        file = _os.path.join(root, "patches", "__init__.py")
        if name != "mindspeed_lite.patches" or not all(map(_os.path.isfile, (file, _os.path.join(root, "setup.py")))):
            return None
        from importlib.util import spec_from_file_location

        return spec_from_file_location(name, file, submodule_search_locations=[_os.path.dirname(file)])


# First, since another checkout may be installed.
if not any(getattr(each, "__name__", "") == "_Patches" for each in _sys.meta_path):
    _sys.meta_path.insert(0, _Patches)  # type: ignore[arg-type]


def enable(*, host_args: Any = None, **flags: Any) -> Report:
    """Turn on features, together with the active ones; all or none.

    Call before the model is built: most features that act at construction skip existing modules. Later values of a flag
    win.

    Args:
        host_args: for conditions, `model.config` or a script's arguments; None assumes nothing.
        **flags: features (`use_flash_attn=True`), other flags with underscores, and `auto`, `strict`,
            `allow_unverified`.

    Raises:
        mindspeed_lite.engine.EngineError: unknown flag or value, conflict, missing target.
        mindspeed_lite.platform.DeviceError: unusable device.
    """
    from mindspeed_lite import runtime

    asked = [*runtime.requests(), runtime.by_keyword(flags, host_args)]
    return runtime.full_report(runtime.apply_requests(asked))


def disable() -> list[str]:
    """Undo all features and parser flags; live models continue without them.

    The device layer stays; `mindspeed_lite.platform.deactivate()` undoes it too. Returns places left alone because a
    third party has changed them.
    """
    from mindspeed_lite import runtime

    left = runtime.disable_all()
    adaptor = _sys.modules.get("mindspeed_lite.megatron_adaptor")
    if adaptor is not None:
        adaptor.remove()
    return left


@contextlib.contextmanager
def enabled(*, host_args: Any = None, **flags: Any) -> Iterator[Report]:
    """`enable` for a block; afterwards restore the previous features."""
    from mindspeed_lite import runtime

    before = runtime.requests()
    own = runtime.by_keyword(flags, host_args)
    active = runtime.apply_requests([*before, own])
    try:
        yield runtime.full_report(active)
    finally:
        # Absent if an outer block ended first, or after `disable`.
        if own in runtime.requests():
            if before:
                runtime.apply_requests(before)
            else:
                runtime.disable_all()


def report() -> Report | None:
    """Active features with targets, backends, reasons and fallbacks; None without features."""
    from mindspeed_lite import runtime

    active = runtime.current()
    return None if active is None else runtime.full_report(active)


def sleep(model: Any, optimizer: Any = None, keep: Sequence[str] = (), to: str | None = None) -> SleepReport:
    """Free the device memory of a model and its optimizer between two steps, until `wake`.

    Weights and optimizer states move to host memory, pinned where there is a device, which the next call reuses.
    Gradients are dropped. All ranks call it. Needs no feature.

    Args:
        model: a module, or the list of its chunks.
        keep: of `weights`, `optimizer`, `gradients`.
        to: folder; files there replace host memory.

    Raises:
        mindspeed_lite.memory.sleep.SleepError: the model sleeps already, or cannot.
    """
    from mindspeed_lite.memory import sleep as sleeping

    return sleeping.sleep(model, optimizer, keep, to)


def wake(*parts: str, model: Any = None) -> SleepReport:
    """Restore what `sleep` has moved, bit for bit: these parts or all, of this model or of all that sleep.

    The copies of a device are asynchronous: later work on its current stream waits for them.
    """
    from mindspeed_lite.memory import sleep as sleeping

    return sleeping.wake(parts, model)
