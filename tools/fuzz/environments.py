"""The surroundings that a worker process is started in: instruction sets, switches, and what a machine may lack."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

# What oneDNN is held to -> a flag in /proc/cpuinfo without which the level is the one before.
_LEVELS = {
    "SSE41": "sse4_1",
    "AVX2": "avx2",
    "AVX2_VNNI": "avx_vnni",
    "AVX512_CORE": "avx512f",
    "AVX512_CORE_VNNI": "avx512_vnni",
    "AVX512_CORE_BF16": "avx512_bf16",
    "AVX512_CORE_AMX": "amx_tile",
}
NO_MKLDNN = "no mkldnn"


def environments() -> dict[str, dict[str, str]]:
    """Name -> environment variables, of those that make a difference on this processor."""
    flags = _flags()
    found: dict[str, dict[str, str]] = {"as it is": {}}
    found |= {f"onednn {level}": {"ONEDNN_MAX_CPU_ISA": level} for level, flag in _LEVELS.items() if flag in flags}
    found |= {
        f"aten {level}": {"ATEN_CPU_CAPABILITY": level} for level in ("default", "avx2") if level in flags | {"default"}
    }
    # PyTorch's switch; the worker sets it.
    found[NO_MKLDNN] = {}
    found["no compiler"] = {"CXX": "no-such-compiler"}
    found["no cache"] = {"MINDSPEED_LITE_CACHE": "/dev/null/none", "XDG_CACHE_HOME": "/dev/null/none"}
    return found


@contextlib.contextmanager
def variables(name: str) -> Iterator[Mapping[str, str]]:
    """The environment variables of `name`, good within the block."""
    own = environments()[name]
    if name != "no compiler":
        yield own
        return
    # Kernels that were compiled before would be found.
    with tempfile.TemporaryDirectory() as folder:
        yield {**own, "MINDSPEED_LITE_CACHE": folder}


def _flags() -> set[str]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("flags"):
                return set(line.split())
    return set()
