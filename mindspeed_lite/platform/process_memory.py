"""Memory of this process in bytes, reported by the CPU device; from Linux's /proc."""

from __future__ import annotations

import os
import resource

_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * _PAGE


def peak_resident() -> int:
    # Sandboxed kernels may lack VmHWM.
    return _field("/proc/self/status", b"VmHWM:") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
