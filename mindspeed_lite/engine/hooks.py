"""Import callbacks that can be cancelled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType

from wrapt import register_post_import_hook

# wrapt cannot remove a hook: each module gets one, which calls the handles of this list.
_waiting: dict[str, list[ImportHandle]] = {}


class ImportHandle:
    def __init__(self, module_name: str, callback: Callable[[ModuleType], object]) -> None:
        self._module_name = module_name
        self._callback: Callable[[ModuleType], object] | None = callback
        self._module: ModuleType | None = None

    def cancel(self) -> None:
        self._callback = None
        waiting = _waiting.get(self._module_name, [])
        if self in waiting:
            waiting.remove(self)

    def __call__(self, module: ModuleType) -> None:
        # Some wrapt releases notify again on reload in place.
        if self._callback is not None and self._module is not module:
            self._module = module
            self._callback(module)


def when_imported(module_name: str, callback: Callable[[ModuleType], object]) -> ImportHandle:
    """Call `callback(module)` once per module object, now or on import."""
    handle = ImportHandle(module_name, callback)
    is_known = module_name in _waiting
    _waiting.setdefault(module_name, []).append(handle)
    if not is_known:
        register_post_import_hook(partial(_notify, module_name), module_name)
    elif sys.modules.get(module_name) is not None:
        handle(sys.modules[module_name])
    return handle


def _notify(module_name: str, module: ModuleType) -> None:
    for handle in tuple(_waiting.get(module_name, ())):
        handle(module)
