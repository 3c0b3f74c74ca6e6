"""Turns off model switches for a fused form when its feature ends.

Megatron reads them every step from configurations that may outlive the feature.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from mindspeed_lite.engine import Around, Function, Session


def switch_off(owner: Any, name: str, session: Session, is_there: Callable[[], bool]) -> None:
    """Clear `owner.name` when the feature ends, unless Megatron itself has the form.

    is_there: called after the undo; whether Megatron has the form.
    """
    reference = weakref.ref(owner)

    def end() -> None:
        found = reference()
        if found is not None and not is_there():
            setattr(found, name, False)

    if getattr(owner, name, False):
        session.on_end(end)


def config_field(name: str, is_there: Callable[[], bool]) -> Around:
    """Patch that applies `switch_off` to a field of every configuration a module is built with."""

    def around(wrapped: Function, session: Session) -> Function:
        def __init__(self: Any, config: Any) -> None:
            wrapped(self, config)
            seen: dict[int, Any] = session.state(f"configurations with {name}", dict)
            # Configurations are not hashable, and ids are reused.
            if id(config) not in seen or seen[id(config)]() is not config:
                seen[id(config)] = weakref.ref(config)
                switch_off(config, name, session, is_there)

        return __init__

    return Around("megatron.core.transformer.module:MegatronModule.__init__", around)
