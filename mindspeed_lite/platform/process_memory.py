"""Memory of this process in bytes, reported by the CPU device; from Linux's /proc."""

from __future__ import annotations

import ctypes
import functools
import os
import resource
from typing import Any

_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * _PAGE


def peak_resident() -> int:
    # Sandboxed kernels may lack VmHWM.
    return _field("/proc/self/status", b"VmHWM:") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def handed_out() -> int | None:
    """Bytes in glibc's malloc; None if unknown, too small under a preloaded allocator."""
    ask = _mallinfo()
    if ask is None:
        return None
    found = ask()
    return int(found.uordblks + found.hblkhd)


def shared() -> int:
    return _field("/proc/self/status", b"RssShmem:") or 0


class _Figures(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


@functools.cache
def _mallinfo() -> Any:
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):  # not glibc, or before 2.33
        return None
    ask.restype = _Figures
    return ask


def reset_peak() -> bool:
    """Start a new peak; False if the kernel cannot."""
    try:
        with open("/proc/self/clear_refs", "w") as clear_refs:
            clear_refs.write("5")
    except OSError:
        return False
    return True


def total() -> int:
    return os.sysconf("SC_PHYS_PAGES") * _PAGE


def available() -> int:
    return _field("/proc/meminfo", b"MemAvailable:") or max(0, total() - resident())


def _field(path: str, name: bytes) -> int:
    """Field in bytes; 0 if the kernel lacks it."""
    with open(path, "rb") as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith(name)), 0)
