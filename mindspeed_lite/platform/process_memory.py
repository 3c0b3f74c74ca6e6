"""Memory of this process in bytes, reported by the CPU device."""

from __future__ import annotations

import os
import resource

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def resident() -> int:
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * _PAGE
    except OSError:
        return peak_resident()


def peak_resident() -> int:
    found = _field("/proc/self/status", b"VmHWM:")
    if found is not None:
        return found
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if os.uname().sysname == "Darwin" else peak * 1024


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
    found = _field("/proc/meminfo", b"MemAvailable:")
    return max(0, total() - resident()) if found is None else found


def _field(path: str, name: bytes) -> int | None:
    try:
        with open(path, "rb") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith(name)), None)
    except OSError:
        return None
