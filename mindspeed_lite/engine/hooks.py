"""Import callbacks."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from wrapt import register_post_import_hook


class ImportHandle:
    def __init__(self, callback: Callable[[ModuleType], object]) -> None:
        self._callback: Callable[[ModuleType], object] | None = callback
        self._module: ModuleType | None = None

    def cancel(self) -> None:
        self._callback = None

    def __call__(self, module: ModuleType) -> None:
        # Some wrapt releases notify again on reload in place.
        if self._callback is not None and self._module is not module:
            self._module = module
            self._callback(module)


def when_imported(module_name: str, callback: Callable[[ModuleType], object]) -> ImportHandle:
    """Call `callback(module)` once per module object, now or on import."""
    handle = ImportHandle(callback)
    register_post_import_hook(handle, module_name)
    return handle
