"""Quantization, which is off: queries answer so, and enabling it raises an error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ..recorded import recorded


def _off(given: Any) -> Iterator[None]:
    if given.enabled or getattr(given, "calibrating", False):
        raise RuntimeError("Transformer Engine's stand-in quantizes nothing")
    yield


@contextlib.contextmanager
@recorded
def fp8_autocast(given: Any) -> Iterator[None]:
    """Quantized matrix products within."""
    return _off(given)


@contextlib.contextmanager
@recorded
def autocast(given: Any) -> Iterator[None]:
    """Quantized matrix products within."""
    return _off(given)


@contextlib.contextmanager
@recorded
def fp8_model_init(given: Any) -> Iterator[None]:
    """Quantized parameters of modules made within."""
    return _off(given)


@contextlib.contextmanager
@recorded
def quantized_model_init(given: Any) -> Iterator[None]:
    """Quantized parameters of modules made within."""
    return _off(given)


class FP8GlobalStateManager:
    """State of fp8 in this process."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Whether matrix products are quantized."""
        return False

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Whether ranges are recorded."""
        return False

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Whether modules get quantized parameters."""
        return False

    @classmethod
    def get_fp8_recipe(cls) -> None:
        """The recipe in use."""

    @classmethod
    def reset(cls) -> None:
        """Forget all state."""
