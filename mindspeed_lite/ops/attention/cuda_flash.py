"""Which of PyTorch's implementations of flash attention serves: its own (FA2), an installed FA3 or FA4, or cuDNN's.

FA3 is written for compute capability 9, FA4 for 10; PyTorch puts either in the place of its own for the whole process
(`torch.nn.attention.activate_flash_attention_impl`), and what they do not take raises there: hence `activate` wants to
know whether calls will have dropout or a window, and `undo` belongs to its caller. Where neither serves on these
devices, cuDNN's kernels are asked before FA2, for the time of a call. (FA2 reaches a third to a half of an H100's peak,
FA3 and cuDNN two thirds to three quarters, by their authors' figures: J. Shah et al., "FlashAttention-3", 2024.)
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

# By major compute capability: the implementation, and the package that brings it.
_WRITTEN_FOR = {9: ("FA3", "flash_attn_interface"), 10: ("FA4", "flash_attn.cute.interface")}
_NEWER = 9


class Choice(NamedTuple):
    """An implementation, and why it is not the one that is written for the device."""

    implementation: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        if not self.reasons:
            return f"flash attention is {self.implementation}"
        return f"flash attention is cuDNN's where it serves, else {self.implementation}: {'; '.join(self.reasons)}"


def choose(capability: int, *, dropout: bool, window: bool) -> Choice:
    """For a device of this major compute capability and calls of which some have dropout or a window."""
    if capability not in _WRITTEN_FOR:
        return Choice("FA2", ())
    name, package = _WRITTEN_FOR[capability]
    attention: Any = torch.nn.attention
    reasons = []
    if not hasattr(attention, "activate_flash_attention_impl"):
        reasons.append(f"{name}: torch {torch.__version__} cannot activate it (2.11 can)")
    elif attention.current_flash_attention_impl() is not None:
        return Choice(attention.current_flash_attention_impl(), ())
    if not _is_installed(package):
        reasons.append(f"{name}: {package} is not installed")
    if dropout:
        reasons.append(f"{name} takes no dropout")
    if torch.are_deterministic_algorithms_enabled():
        reasons.append(f"{name} does not promise the deterministic sums that are asked for")
    if window and name == "FA4":
        reasons.append("FA4 has no backward pass for a window")
    return Choice("FA2" if reasons else name, tuple(reasons))


def activate(*, dropout: bool, window: bool) -> tuple[Choice, Callable[[], None]]:
    """Put the chosen implementation in place; returns the choice, and how to take it out again."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return Choice("FA2", ()), _nothing
    choice = choose(torch.cuda.get_device_capability()[0], dropout=dropout, window=window)
    attention: Any = torch.nn.attention
    if choice.implementation == "FA2" or attention.current_flash_attention_impl() is not None:
        return choice, _nothing
    try:
        attention.activate_flash_attention_impl(choice.implementation)
    except Exception as error:  # whatever a foreign package raises at import is the reason
        return Choice("FA2", (f"{choice.implementation}: {type(error).__name__}: {error}",)), _nothing
    return choice, functools.partial(_undo, choice.implementation)


def order() -> contextlib.AbstractContextManager[Any]:
    """Within it scaled_dot_product_attention asks cuDNN first, where that is worth it; then all is as it was."""
    attention: Any = torch.nn.attention
    switches: Any = torch.backends.cuda
    if torch.compiler.is_compiling() or not _is_newer() or not switches.cudnn_sdp_enabled():
        return contextlib.nullcontext()
    if getattr(attention, "current_flash_attention_impl", _nothing)() is not None:
        return contextlib.nullcontext()
    found = attention.SDPBackend
    enabled = {
        found.CUDNN_ATTENTION: True,
        found.FLASH_ATTENTION: switches.flash_sdp_enabled(),
        found.EFFICIENT_ATTENTION: switches.mem_efficient_sdp_enabled(),
        found.MATH: switches.math_sdp_enabled(),
    }
    context: contextlib.AbstractContextManager[Any] = attention.sdpa_kernel(
        [backend for backend, is_enabled in enabled.items() if is_enabled], set_priority=True
    )
    return context


@functools.cache
def _is_newer() -> bool:
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability()[0] >= _NEWER


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False


def _undo(implementation: str) -> None:
    attention: Any = torch.nn.attention
    if attention.current_flash_attention_impl() == implementation:
        attention.restore_flash_attention_impl()


def _nothing() -> None:
    return None
