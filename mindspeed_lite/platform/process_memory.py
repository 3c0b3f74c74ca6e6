"""Memory of this process in bytes, as the CPU device's answer to "how much has the device allocated"."""

from __future__ import annotations

import ctypes
import functools
import os
import resource
from typing import Any

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def resident() -> int:
    """Resident set size now."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * _PAGE
    except OSError:  # not Linux: the peak is the only figure at hand
        return peak_resident()


def peak_resident() -> int:
    """Largest resident set size since the start or the last `reset_peak`."""
    try:
        with open("/proc/self/status", "rb") as status:
            for line in status:
                if line.startswith(b"VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if os.uname().sysname == "Darwin" else peak * 1024


def handed_out() -> int | None:
    """What glibc's malloc has handed out and not got back; None where that is not known.

    Beside it `resident` has what the heap keeps between such blocks, code, and what is mapped otherwise; of a block
    that has not been written to, it has nothing. Where another allocator is preloaded, this may be next to nothing.
    """
    ask = _mallinfo()
    if ask is None:
        return None
    found = ask()
    return int(found.in_arenas + found.mapped)


def shared() -> int:
    """Resident bytes of shared memory."""
    try:
        with open("/proc/self/status", "rb") as status:
            return next((int(line.split()[1]) * 1024 for line in status if line.startswith(b"RssShmem:")), 0)
    except OSError:
        return 0


class _Figures(ctypes.Structure):
    """struct mallinfo2 of <malloc.h>; what is called here `in_arenas` and `mapped` are its uordblks and hblkhd."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "mapped"),
            *("usmblks", "fsmblks", "in_arenas", "fordblks", "keepcost"),
        )
    )


@functools.cache
def _mallinfo() -> Any:
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):  # another C library, or glibc before 2.33
        return None
    ask.restype = _Figures
    return ask


def reset_peak() -> bool:
    """Start a new peak measurement; False where the kernel does not offer it."""
    try:
        with open("/proc/self/clear_refs", "w") as clear_refs:
            clear_refs.write("5")
    except OSError:
        return False
    return True


def total() -> int:
    """Memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * _PAGE


def available() -> int:
    """Memory that a new allocation could still get."""
    try:
        with open("/proc/meminfo", "rb") as meminfo:
            for line in meminfo:
                if line.startswith(b"MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return max(0, total() - resident())
