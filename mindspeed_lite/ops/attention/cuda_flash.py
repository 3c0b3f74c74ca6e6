"""Chooses the flash attention implementation: PyTorch's (FA2), installed FA3 or FA4, or cuDNN.

FA3 targets compute capability 9, FA4 10. Either replaces PyTorch's for the whole process
(`torch.nn.attention.activate_flash_attention_impl`) and raises for dropout or windows. Without them cuDNN is tried
before FA2, per call, also for the log-sum-exp. (Of an H100's peak FA2 reaches a third to a half, the others two thirds
to three quarters: J. Shah et al., "FlashAttention-3", 2024.)
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

# Major compute capability -> implementation and its package.
_WRITTEN_FOR = {9: ("FA3", "flash_attn_interface"), 10: ("FA4", "flash_attn.cute.interface")}
_NEWER = 9


class Choice(NamedTuple):
    """An implementation, and why it is not the one written for the device."""

    implementation: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        if not self.reasons:
            return f"flash attention is {self.implementation}"
        return f"flash attention is cuDNN's where it serves, else {self.implementation}: {'; '.join(self.reasons)}"


def choose(capability: int, *, dropout: bool, window: bool) -> Choice:
    """Choice for this major compute capability; whether some calls have dropout or a window."""
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
    """Activates the choice; returns it and an undo callable."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return Choice("FA2", ()), _nothing
    choice = choose(torch.cuda.get_device_capability()[0], dropout=dropout, window=window)
    attention: Any = torch.nn.attention
    if choice.implementation == "FA2" or attention.current_flash_attention_impl() is not None:
        return choice, _nothing
    try:
        attention.activate_flash_attention_impl(choice.implementation)
    except Exception as error:  # a vendor package may raise anything at import
        return Choice("FA2", (f"{choice.implementation}: {type(error).__name__}: {error}",)), _nothing
    return choice, functools.partial(_undo, choice.implementation)


class KnownBug(NamedTuple):
    """Calls whose gradients are wrong in cuDNN, and the report of it."""

    concerns: Callable[[bool, int, int], bool]  # (masked, queries, keys)
    what: str
    source: str


CUDNN_BUGS = (
    KnownBug(
        # Lengths of 64 modulo 128 were seen to fail; only full tiles of 128 keys are trusted.
        lambda masked, queries, keys: masked and keys % 128 != 0,
        "NaN in dQ with a mask, a length of 64 modulo 128 and a log-sum-exp below -88",
        "https://github.com/pytorch/pytorch/issues/196678",
    ),
    KnownBug(
        lambda masked, queries, keys: queries == 1,
        "NaN in dK and dV of a single query with a log-sum-exp below -88",
        "https://github.com/NVIDIA/cudnn-frontend/issues/1072",
    ),
)


# cuDNN plans each length anew, for tens of milliseconds and more; lengths beyond these run the flash kernel.
_MOST_LENGTHS = 16
_lengths: set[tuple[bool, int, int]] = set()


def takes_cudnn(*, masked: bool, queries: int, keys: int) -> bool:
    """Whether cuDNN is to be tried first: it is faster, right, and has a plan or may make one."""
    if not torch.backends.cuda.cudnn_sdp_enabled() or not _is_faster() or _errs(masked, queries, keys):  # type: ignore[no-untyped-call]
        return False
    length = (masked, queries, keys)
    if len(_lengths) < _MOST_LENGTHS:
        _lengths.add(length)
    return length in _lengths


def order(*, masked: bool, queries: int, keys: int, is_served: bool = True) -> contextlib.AbstractContextManager[Any]:
    """Context in which scaled_dot_product_attention tries cuDNN first where it is to be taken, and else never.

    is_served: whether cuDNN takes the dtype and head size; others use up none of its lengths.
    """
    attention: Any = torch.nn.attention
    switches: Any = torch.backends.cuda
    if not switches.cudnn_sdp_enabled() or not (_errs(masked, queries, keys) or _is_faster()):
        return contextlib.nullcontext()
    found = attention.SDPBackend
    enabled = {
        found.CUDNN_ATTENTION: is_served and takes_cudnn(masked=masked, queries=queries, keys=keys),
        found.FLASH_ATTENTION: switches.flash_sdp_enabled(),
        found.EFFICIENT_ATTENTION: switches.mem_efficient_sdp_enabled(),
        found.MATH: switches.math_sdp_enabled(),
    }
    context: contextlib.AbstractContextManager[Any] = attention.sdpa_kernel(
        [backend for backend, is_enabled in enabled.items() if is_enabled], set_priority=True
    )
    return context


def _errs(masked: bool, queries: int, keys: int) -> bool:
    return any(bug.concerns(masked, queries, keys) for bug in CUDNN_BUGS)


def _is_faster() -> bool:
    if torch.compiler.is_compiling() or not _is_newer():
        return False
    return getattr(torch.nn.attention, "current_flash_attention_impl", _nothing)() is None


@functools.cache
def _is_newer() -> bool:
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability()[0] >= _NEWER


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _undo(implementation: str) -> None:
    attention: Any = torch.nn.attention
    if attention.current_flash_attention_impl() == implementation:
        attention.restore_flash_attention_impl()


def _nothing() -> None:
    return None
