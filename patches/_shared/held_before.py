"""Objects that a feature has changed in place, so that it takes hold of them again when it is turned on again.

Reinforcement learning turns features off for generation and on for training, over one model and one optimizer. Nothing
of a session is kept: weak references, and what the feature needs to know of each.
"""

from __future__ import annotations

import weakref
from typing import Any

_KNOWN: dict[str, weakref.WeakKeyDictionary[Any, Any]] = {}


def held_before(feature: str) -> weakref.WeakKeyDictionary[Any, Any]:
    """Living object -> what the feature has noted of it."""
    return _KNOWN.setdefault(feature, weakref.WeakKeyDictionary())
