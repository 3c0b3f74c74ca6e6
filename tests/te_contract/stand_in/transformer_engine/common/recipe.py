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


class MXFP8BlockScaling(Recipe):
    """Scale of 32 values."""


class NVFP4BlockScaling(Recipe):
    """Scales of 16 values, in fp4."""


class CustomRecipe(Recipe):
    """Quantizers of a factory."""
