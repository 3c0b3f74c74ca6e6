"""Keeping freed memory: done by default on glibc, in every thread, and refused with reasons."""

import json

import pytest

from mindspeed_lite import platform
from mindspeed_lite.platform import allocator
from tests.harness.commands import python

glibc_only = pytest.mark.skipif(bool(allocator.why_not()), reason="; ".join(allocator.why_not()) or "glibc")

# Memory by ctypes, not torch: malloc, touch every page, free.
MEASURE = """\
import ctypes, json, resource, sys, threading
from mindspeed_lite.platform import allocator
assert "torch" not in sys.modules
if sys.argv[1] == "keep":
    assert allocator.keep_freed_memory() == [] and allocator.keeps()
    assert allocator.keep_freed_memory() == []
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes, libc.memset.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def make(size):
    block = libc.malloc(size); libc.memset(block, 1, size); return block
def here(size): libc.free(make(size))
def in_a_thread(size):
    thread = threading.Thread(target=here, args=(size,)); thread.start(); thread.join()
def freed_by_a_thread(size):
    thread = threading.Thread(target=libc.free, args=(make(size),)); thread.start(); thread.join()
def faults(way, size):
    for _ in range(3): way(size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3): way(size)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(json.dumps([faults(way, 1 << 27) for way in (here, in_a_thread, freed_by_a_thread)]))
"""


@glibc_only
@pytest.mark.parametrize("choice", ["keep", "system"])
def test_memory_freed_is_memory_kept(choice):
    run = python("-c", MEASURE, choice)
    assert run.returncode == 0, run.stderr
    pages = 3 * (1 << 27) // 4096
    for faults in json.loads(run.stdout):
        assert faults < pages // 10 if choice == "keep" else faults > pages // 2


@glibc_only
def test_what_the_user_tuned_stays(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")
    reasons = allocator.why_not()
    assert "MALLOC_TRIM_THRESHOLD_, GLIBC_TUNABLES" in reasons[0] and not allocator.keeps()
    assert allocator.keep_freed_memory() == reasons != []


def test_the_command_line_wins_over_the_environment(monkeypatch):
    monkeypatch.delenv(allocator.ALLOCATOR_VARIABLE, raising=False)
    assert allocator.wanted() == "keep"
    monkeypatch.setenv(allocator.ALLOCATOR_VARIABLE, "system")
    assert allocator.wanted() == "system" and allocator.wanted("keep") == "keep"
    monkeypatch.setenv(allocator.ALLOCATOR_VARIABLE, "fast")
    with pytest.raises(platform.DeviceError, match=r"MINDSPEED_LITE_ALLOCATOR=fast.*keep or system"):
        allocator.wanted()
    with pytest.raises(platform.DeviceError, match=r"--allocator KEEP"):
        allocator.wanted("KEEP")
