"""Lets the CPU device keep the memory it frees, as a GPU's caching allocator does.

glibc hands large blocks back to the kernel when they are freed, and the next tensor of that size pays for its
memory page by page again. `keep_freed_memory` turns that off for the process by `mallopt`, in three settings:

M_MMAP_MAX = 0         no block is a mapping of its own; those are unmapped at every free
M_TRIM_THRESHOLD = -1  the end of the heap is never given back
M_ARENA_MAX = 1        threads share the heap; a thread's own ends at 64 MB, and larger blocks become mappings

The price is memory: what was freed stays resident, and a hole serves only what fits into it. Resident memory
then means "reserved", not "in use".

    python -m mindspeed_lite.platform.allocator

measures both ways, each in a process of its own; per tensor made, filled and freed, glibc 2.36 on 2 cores:

tensor                         system ms     keep ms   ratio    faults    faults
64 MB here                         40.44        2.41   16.8x     16385         0
64 MB in a thread                  30.36        4.14    7.3x     16390      3278
64 MB freed by a thread            43.60        3.82   11.4x     16386         1
500 MB here                       305.42       28.99   10.5x    128001         0
500 MB in a thread                323.92       21.84   14.8x    128002         1
500 MB freed by a thread          319.17       21.59   14.8x    128002         1
resident MB, end                     554        1989
resident MB, peak                   1054        1989

Up to 32 MB glibc learns by itself not to map a size that was freed before; there the gain is small.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

ALLOCATOR_VARIABLE = "MINDSPEED_LITE_ALLOCATOR"
KEEP = "keep"
SYSTEM = "system"

# Numbers from glibc's <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_SETTINGS = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_ARENA_MAX, 1))

# By these a user has tuned glibc already; mallopt would overrule them.
_TUNING = {
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
}

_kept = False


def wanted(given: str | None = None) -> str:
    """`keep` or `system`: `given`, else MINDSPEED_LITE_ALLOCATOR, else `keep`.

    Raises:
        ValueError: any other value; the text names where it came from.
    """
    value = given if given is not None else os.environ.get(ALLOCATOR_VARIABLE) or KEEP
    if value not in (KEEP, SYSTEM):
        where = "--allocator " if given is not None else f"{ALLOCATOR_VARIABLE}="
        raise ValueError(f"{where}{value} is not an allocator; choose {KEEP} or {SYSTEM}")
    return value


def why_not() -> list[str]:
    """Every reason why freed memory cannot be kept in this process; empty means it can."""
    if not sys.platform.startswith("linux"):
        return [f"{sys.platform} has no mallopt; this is for Linux with glibc"]
    process = ctypes.CDLL(None)
    if not hasattr(process, "gnu_get_libc_version") or not hasattr(process, "mallopt"):
        return ["the C library is not glibc"]
    reasons = []
    serves = _library_of(process, "malloc")
    if serves and serves != _library_of(process, "gnu_get_libc_version"):
        reasons.append(f"memory comes from {serves}, not from glibc")
    tuned = sorted(_TUNING & os.environ.keys())
    if "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        tuned.append("GLIBC_TUNABLES")
    if tuned:
        reasons.append(f"the environment tunes glibc already ({', '.join(tuned)})")
    return reasons


def keep_freed_memory() -> list[str]:
    """Keep what is freed from now on; returns the reasons why not, empty when done. It cannot be taken back.

    As effective after torch's import as before it.
    """
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
    """Whether this process keeps its freed memory."""
    return _kept


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _library_of(process: ctypes.CDLL, function: str) -> str:
    """The file that `function` of this process comes from; empty where it cannot be told."""
    if not hasattr(process, "dladdr"):
        return ""
    info = _DlInfo()
    found = process.dladdr(ctypes.cast(getattr(process, function), ctypes.c_void_p), ctypes.byref(info))
    return os.fsdecode(info.file) if found and info.file else ""


_SIZES_MB = (1, 16, 64, 500)


def _measure(choice: str) -> dict[str, dict[str, float]]:
    """Milliseconds and page faults per tensor made, filled and freed, by size; and resident memory in MB."""
    import resource

    reasons = keep_freed_memory() if choice == KEEP else []
    if reasons:
        raise SystemExit(f"freed memory cannot be kept here: {'; '.join(reasons)}")
    import torch

    from . import process_memory

    def here(megabytes: int) -> None:
        torch.empty(megabytes << 18).fill_(1)

    def in_a_thread(megabytes: int) -> None:
        thread = threading.Thread(target=here, args=(megabytes,))
        thread.start()
        thread.join()

    def freed_by_a_thread(megabytes: int) -> None:
        box = [torch.empty(megabytes << 18).fill_(1)]
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()

    found: dict[str, dict[str, float]] = {}
    ways: tuple[Callable[[int], None], ...] = (here, in_a_thread, freed_by_a_thread)
    for megabytes in _SIZES_MB:
        for way in ways:
            for _ in range(3):
                way(megabytes)
            times, faults = [], resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(5):
                start = time.perf_counter()
                way(megabytes)
                times.append(time.perf_counter() - start)
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
            name = f"{megabytes} MB {way.__name__.replace('_', ' ')}"
            found[name] = {"ms": min(times) * 1e3, "faults": faults / 5}
    found["resident"] = {
        "end": process_memory.resident() / 2**20,
        "peak": process_memory.peak_resident() / 2**20,
    }
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure both ways and print them side by side."""
    parser = argparse.ArgumentParser(prog="python -m mindspeed_lite.platform.allocator", description=main.__doc__)
    parser.add_argument("--only", choices=(KEEP, SYSTEM), help="measure one way in this process; prints JSON")
    only = parser.parse_args(arguments).only
    if only:
        print(json.dumps(_measure(only)))
        return 0
    results = {}
    for choice in (SYSTEM, KEEP):
        command = [sys.executable, "-m", "mindspeed_lite.platform.allocator", "--only", choice]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if run.returncode != 0:
            return run.returncode
        results[choice] = json.loads(run.stdout)
    off, on = results[SYSTEM], results[KEEP]
    print(f"{'tensor':28}{'system ms':>12}{'keep ms':>12}{'ratio':>8}{'faults':>10}{'faults':>10}")
    for name in off:
        if name != "resident":
            ratio = off[name]["ms"] / on[name]["ms"]
            print(
                f"{name:28}{off[name]['ms']:12.2f}{on[name]['ms']:12.2f}{ratio:7.1f}x"
                f"{off[name]['faults']:10.0f}{on[name]['faults']:10.0f}"
            )
    for moment in ("end", "peak"):
        before, after = off["resident"][moment], on["resident"][moment]
        print(f"{'resident MB, ' + moment:28}{before:12.0f}{after:12.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
