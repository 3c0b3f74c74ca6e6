"""Recipes of quantization. They can be named; the stand-in quantizes nothing."""

from __future__ import annotations

import enum
from typing import Any


class Format(enum.Enum):
    """Formats of fp8."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


class Recipe:
    """Base of all recipes."""

    def __init__(self, **options: Any) -> None:
        self.__dict__.update(options)


class DelayedScaling(Recipe):
    """Scale of earlier steps."""


class Float8CurrentScaling(Recipe):
    """Scale of the current tensor."""


class Float8BlockScaling(Recipe):
    """Scale of a block."""


MXFP8BlockScaling = NVFP4BlockScaling = CustomRecipe = Float8BlockScaling
