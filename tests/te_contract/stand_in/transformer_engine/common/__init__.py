"""Recipes of quantization."""

from . import recipe

__all__ = ["recipe"]
