"""Switches of a model by which Megatron asks for a fused form that a feature supplies: off again when the feature ends.

Megatron reads them at every step, from the model's configuration and from layers that have copied them. A model that
outlives the feature would ask for what is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from mindspeed_lite.engine import Around, Session


def switch_off(owner: Any, name: str, session: Session, is_there: Callable[[], bool]) -> None:
    """Let the attribute `name` of `owner` be False from the end of the feature on, unless Megatron has the form itself.

    is_there: asked once the patches have gone, whether Megatron has the form without them.
    """
    reference = weakref.ref(owner)

    def end() -> None:
        found = reference()
        if found is not None and not is_there():
            setattr(found, name, False)

    if getattr(owner, name, False):
        session.on_end(end)


def config_field(name: str, is_there: Callable[[], bool]) -> Around:
    """The patch that does so for a field of every configuration, copies included, that a module is built with."""

    def around(wrapped: Callable[..., None], session: Session) -> Callable[..., None]:
        def __init__(self: Any, config: Any) -> None:
            wrapped(self, config)
            seen: dict[int, Any] = session.state(f"configurations with {name}", dict)
            # A configuration has no hash; an entry whose object has gone is another's.
            if id(config) not in seen or seen[id(config)]() is not config:
                seen[id(config)] = weakref.ref(config)
                switch_off(config, name, session, is_there)

        return __init__

    return Around("megatron.core.transformer.module:MegatronModule.__init__", around)
