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
    """Imports `mindspeed_lite.patches` from the folder `patches` of a checkout."""

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

    Calls add up; of two values for one flag the later one counts. Enable features before the model is built: what acts
    where a model is made (norms, optimizers, recomputation) does nothing for an existing one, except norms and
    optimizers that had the feature before `disable`.

    Args:
        host_args: a namespace, dataclass or mapping with the model's arguments under Megatron's names
            (`transformer_impl`, `normalization`, ...) for the features' conditions; it is only read. Without it
            nothing is assumed.
        **flags: names of features (`use_flash_attn=True`), other flags with underscores and without dashes, and
            `auto`, `strict`, `allow_unverified`.

    Returns:
        The report of what is active now.

    Raises:
        mindspeed_lite.engine.EngineError: an unknown flag or value, a conflict, a target that does not exist.
        mindspeed_lite.platform.DeviceError: the requested device cannot be used.
    """
    from mindspeed_lite import runtime

    asked = [*runtime.requests(), runtime.by_keyword(flags, host_args)]
    return runtime.full_report(runtime.apply_requests(asked))


def disable() -> list[str]:
    """Undo everything: features and the flags in Megatron's parser.

    A live model trains on as if no feature had ever been on. The device layer stays, since Megatron needs it to train
    on this device; `mindspeed_lite.platform.deactivate()` undoes it too.

    Returns:
        What was left alone because a third party has changed it since; usually nothing.
    """
    from mindspeed_lite import runtime

    left = runtime.disable_all()
    adaptor = _sys.modules.get("mindspeed_lite.megatron_adaptor")
    if adaptor is not None:
        adaptor.remove()
    return left


@contextlib.contextmanager
def enabled(*, host_args: Any = None, **flags: Any) -> Iterator[Report]:
    """`enable` for a block; afterwards the features from before it are active again."""
    from mindspeed_lite import runtime

    before = runtime.requests()
    own = runtime.by_keyword(flags, host_args)
    active = runtime.apply_requests([*before, own])
    try:
        yield runtime.full_report(active)
    finally:
        # An outer block that was left first, or `disable`, has turned this one's features off too.
        if own in runtime.requests():
            if before:
                runtime.apply_requests(before)
            else:
                runtime.disable_all()


def report() -> Report | None:
    """What is active now: features, targets, backends, reasons, fallbacks so far; None without features."""
    from mindspeed_lite import runtime

    active = runtime.current()
    return None if active is None else runtime.full_report(active)
