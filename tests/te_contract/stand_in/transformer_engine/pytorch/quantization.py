"""Quantization, which is off: queries answer so, and enabling it raises an error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


def _refuse(enabled: bool) -> None:
    if enabled:
        raise RuntimeError("Transformer Engine's stand-in quantizes nothing")


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    """Quantized matrix products within."""
    _refuse(enabled or calibrating)
    yield


@contextlib.contextmanager
def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Any = None,
    amax_reduction_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    """Quantized matrix products within."""
    _refuse(enabled or calibrating)
    yield


@contextlib.contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Quantized parameters of modules made within."""
    _refuse(enabled)
    yield


@contextlib.contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Quantized parameters of modules made within."""
    _refuse(enabled)
    yield


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
