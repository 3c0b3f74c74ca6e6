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


class _Patches:
    """Finds `mindspeed_lite.patches` beside this package, where it lies in a checkout; nothing else."""

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
    """Swap in the features named by keyword, together with those in force; all or none.

    Calls add up: what is in force afterwards is what all calls ask for together, and of two values for one flag the
    later one counts. Enable features before the model is built: what acts where a model is made (norms, optimizers,
    recomputation) does nothing for one that exists, but for norms and optimizers that had it before `disable`.

    Args:
        host_args: a namespace, dataclass or mapping in which the features' conditions find the model's arguments
            under Megatron's names (`transformer_impl`, `normalization`, ...); without it nothing is assumed. It is
            only read.
        **flags: names of features (`use_flash_attn=True`), other flags with underscores and without dashes, and
            `auto`, `strict`, `allow_unverified`.

    Returns:
        The report of what is in force now.

    Raises:
        mindspeed_lite.engine.EngineError: an unknown flag or value, a conflict, a target that does not exist.
        mindspeed_lite.platform.DeviceError: the requested device cannot be used.
    """
    from mindspeed_lite import runtime

    return runtime.full_report(runtime.put_in_force([*runtime.requests(), runtime.by_keyword(flags, host_args)]))


def disable() -> list[str]:
    """Take everything back: features and the flags in Megatron's parser.

    A live model trains on as if no feature had ever been on. So the device layer, which is what lets Megatron train on
    this device, stays while the process lives; `mindspeed_lite.platform.deactivate()` takes it back too.

    Returns:
        What was left in place because another party has changed it since; usually nothing.
    """
    from mindspeed_lite import runtime

    left = runtime.take_back()
    adaptor = _sys.modules.get("mindspeed_lite.megatron_adaptor")
    if adaptor is not None:
        adaptor.remove()
    return left


@contextlib.contextmanager
def enabled(*, host_args: Any = None, **flags: Any) -> Iterator[Report]:
    """`enable` for a block; after it what was in force before it is in force again, and the device layer stays."""
    from mindspeed_lite import runtime

    before = runtime.requests()
    own = runtime.by_keyword(flags, host_args)
    found = runtime.put_in_force([*before, own])
    try:
        yield runtime.full_report(found)
    finally:
        # An outer block that was left first, or `disable`, has taken this one's features with it.
        if own in runtime.requests():
            if before:
                runtime.put_in_force(before)
            else:
                runtime.take_back()


def report() -> Report | None:
    """What is in force now, or None: features, targets, backends, reasons, fallbacks so far."""
    from mindspeed_lite import runtime

    found = runtime.current()
    return None if found is None else runtime.full_report(found)
