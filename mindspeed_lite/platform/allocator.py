"""Keeps freed CPU memory in the process, like a GPU's caching allocator.

glibc returns large freed blocks to the kernel, and later tensors fault their pages again: 40 instead of 2.4 ms for 64
MB (glibc 2.36, 2 cores). Set are M_MMAP_MAX (no private mappings), M_TRIM_THRESHOLD (never shrink the heap) and
M_ARENA_MAX (thread arenas are limited to 64 MB).
"""

from __future__ import annotations

import ctypes
import os

from . import choice

ALLOCATOR_VARIABLE = "MINDSPEED_LITE_ALLOCATOR"
KEEP = "keep"
SYSTEM = "system"

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_SETTINGS = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_ARENA_MAX, 1))

# User tuning, which mallopt would override.
_TUNING = {f"MALLOC_{name}" for name in "ARENA_MAX MMAP_MAX_ MMAP_THRESHOLD_ TRIM_THRESHOLD_ TOP_PAD_".split()}

_kept = False


def wanted(given: str | None = None) -> str:
    return choice(ALLOCATOR_VARIABLE, (KEEP, SYSTEM), given, "--allocator")


def why_not() -> list[str]:
    process = ctypes.CDLL(None)
    if not hasattr(process, "gnu_get_libc_version") or not hasattr(process, "mallopt"):
        return ["the C library is not glibc"]
    reasons = []
    if "malloc" in (preloaded := os.environ.get("LD_PRELOAD", "")):
        reasons.append(f"memory comes from {preloaded}, not from glibc")
    tuned = sorted(_TUNING & os.environ.keys())
    if "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        tuned.append("GLIBC_TUNABLES")
    if tuned:
        reasons.append(f"the environment tunes glibc already ({', '.join(tuned)})")
    return reasons


def keep_freed_memory() -> list[str]:
    """Keep freed memory, irreversibly; return reasons why not, or []."""
    global _kept
    if _kept:
        return []
    reasons = why_not()
    if reasons:
        return reasons
    mallopt = ctypes.CDLL(None).mallopt
    refused = [str(parameter) for parameter, value in _SETTINGS if not mallopt(parameter, value)]
    if refused:
        return [f"mallopt refuses parameter {', '.join(refused)}"]
    _kept = True
    return []


def keeps() -> bool:
    return _kept
