"""C++ kernels for the CPU: compiled for this machine at first use, cached, called by address.

A kernel is one C++17 file that includes only local and standard headers and uses OpenMP. Libraries are cached
(`platform/cache.py`) under a hash of sources, compiler, flags, processor and PyTorch; one process compiles while others
wait. Not linked to an OpenMP runtime, they share PyTorch's threads; clang needs LLVM's runtime there.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_lite.ops import traced
from mindspeed_lite.ops.traced import address
from mindspeed_lite.platform import cache

__all__ = ["DTYPES", "Library", "numbers", "threads", "without_micro_kernel"]

_HEADERS = Path(__file__).parent
# Letters of parameters in export.h.
_TYPES: Mapping[int, Any] = {
    ord("p"): ctypes.c_void_p,
    ord("l"): ctypes.c_int64,
    ord("i"): ctypes.c_int32,
    ord("f"): ctypes.c_float,
}
# Suffixes of kernels that exist per dtype.
_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
DTYPES = frozenset(_SUFFIXES)
# Results keep their meaning: only `omp simd reduction` reorders sums.
_FLAGS = "-std=c++17 -O3 -march=native -fPIC -fopenmp -fno-math-errno -fno-trapping-math -ffp-contract=fast".split()
_TIMEOUT = 300.0
# Fewer elements do not pay for a second thread.
_SERIAL = 1 << 15

_log = logging.getLogger("mindspeed_lite")


class _Exported(ctypes.Structure):
    """`Exported` of export.h."""

    _fields_ = (("parameters", ctypes.c_char_p), ("call", ctypes.c_void_p))


class Library:
    """The kernels that one C++ source exports (export.h), as attributes; tensors pass as addresses.

    Args:
        source: its path, or that of the Python file of the same name.
        uses_torch: it calls functions exported by libtorch_cpu.
        flags: additional compiler flags.

    A kernel's errors raise MemoryError or RuntimeError.
    """

    def __init__(self, source: str | Path, uses_torch: bool = False, flags: Sequence[str] = ()) -> None:
        self.source = Path(source).with_suffix(".cpp")
        self.uses_torch = uses_torch
        self.flags = tuple(flags)
        self._state: str | None = "not asked yet"
        self._loaded: Any = None

    def unusable(self) -> str | None:
        """Reason why the library is unusable, or None; compiles at the first call."""
        if traced.dry:
            return None
        if self._state == "not asked yet":
            self._state = self._load()
        return self._state

    def kernel(self, name: str, *dtypes: torch.dtype) -> Callable[..., None]:
        """`NAME_bf16` or `NAME_fp32`, for each dtype one suffix."""
        found: Callable[..., None] = getattr(self, "_".join((name, *(_SUFFIXES[dtype] for dtype in dtypes))))
        return found

    def __getattr__(self, name: str) -> Any:
        # Once for each kernel.
        if traced.dry:
            return _nothing
        reason = self.unusable()
        if reason is not None:
            raise RuntimeError(reason)
        try:
            exported = _Exported.in_dll(self._loaded, f"exported_{name}")
        except ValueError:
            raise AttributeError(f"{self.source.name} exports no {name!r}") from None
        function = ctypes.CFUNCTYPE(ctypes.c_int32, *(_TYPES[letter] for letter in exported.parameters))(exported.call)
        function.restype = _status
        kernel = self.__dict__[name] = functools.partial(_call, function)
        return kernel

    def _load(self) -> str | None:
        operator = self.source.parent.name
        try:
            path = _compiled(self.source, self.uses_torch, self.flags)
            # RTLD_NOW: a missing symbol becomes a reason, not a crash at the first call.
            self._loaded = ctypes.CDLL(str(path), mode=os.RTLD_NOW)
        except _Unusable as error:
            return str(error)
        except Exception as error:  # from compiler, file system or loader
            text = f"the compiled CPU kernel of {operator} does not load: {' '.join(str(error).split())}"
            # clang's OpenMP calls, without LLVM's runtime in this PyTorch.
            return text + (": install g++, or let the variable CXX name it" if "__kmpc_" in text else "")
        return None


def _call(function: Callable[..., Any], *given: Any) -> None:
    # A kernel may have been loaded before a dry run.
    if traced.dry:
        return _nothing(*given)
    function(*(address(each) if isinstance(each, Tensor) else each for each in given))


@traced.observed
def _nothing(*given: Any) -> None:
    """A kernel in a dry run."""


class _Unusable(Exception):
    """Reason why there is no library."""


def numbers(values: Sequence[int]) -> Any:
    """int64 array for an argument of kind p."""
    return (ctypes.c_int64 * len(values))(*values)


def without_micro_kernel(library: Library, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Reason why `tiles.h` micro-kernels cannot multiply `dtype` now, or None."""
    if traced.dry:
        return None
    if not torch._C._get_mkldnn_enabled():
        return "oneDNN is switched off (torch.backends.mkldnn)"
    return _without_micro_kernel(library, dtype)


@functools.cache
def _without_micro_kernel(library: Library, dtype: torch.dtype) -> str | None:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this PyTorch is built without oneDNN"
    reason = library.unusable()
    if reason is not None:
        return reason
    right = ctypes.c_int32(0)
    library.probe(dtype.itemsize, ctypes.addressof(right))
    return None if right.value else f"oneDNN has no {str(dtype)[6:]} micro-kernel for this processor"


def _status(code: int) -> None:
    if code:
        raise MemoryError("a CPU kernel found no memory") if code == 1 else RuntimeError("a CPU kernel failed")


def threads(work: int) -> int:
    """Threads for a pass over `work` elements."""
    return 1 if work < _SERIAL else torch.get_num_threads()


def _compiled(source: Path, uses_torch: bool, flags: Sequence[str] = ()) -> Path:
    headers = sorted({*_HEADERS.glob("*.h"), *source.parent.glob("*.h")})
    compiler = _compiler()
    # --no-as-needed: weak symbols alone would not link libtorch_cpu.
    links = [f"-L{Path(torch.__file__).parent / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu"] if uses_torch else []
    flags = (*_FLAGS, *flags)
    parts = [each.read_bytes() for each in (source, *headers)]
    known = (_processor(), *compiler, _version(tuple(compiler)), *flags, *links, torch.__version__)
    parts += [each.encode() for each in (*known, str(torch.version.git_version))]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    try:
        folder = cache.folder()
    except cache.NoCache as error:
        raise _Unusable(f"no folder to keep compiled kernels in ({error})") from None
    path = folder / f"{source.parent.name}-{digest}.so"
    if not _is_ours(path):
        with _alone(folder / f"{path.name}.lock"):
            if not _is_ours(path):
                _compile(compiler, source, flags, links, path)
    return path


def _is_ours(path: Path) -> bool:
    """Whether the library exists and no other user can have written it."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    if found.st_uid != os.getuid():
        raise _Unusable(
            f"the compiled CPU kernel {path} belongs to another user, whose code would be loaded: delete it"
        )
    return found.st_size > 0 and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _compile(compiler: list[str], source: Path, flags: Sequence[str], links: list[str], path: Path) -> None:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        unlinked, linked = Path(scratch) / "kernel.o", Path(scratch) / "kernel.so"
        # Linked without -fopenmp, which would add another OpenMP runtime.
        for command in (
            [*compiler, *flags, f"-I{_HEADERS}", "-c", str(source), "-o", str(unlinked)],
            [*compiler, "-shared", str(unlinked), *links, "-o", str(linked)],
        ):
            done = _run(compiler, command)
            if done.returncode:
                lines = (done.stderr or done.stdout).strip().splitlines()
                first = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
                raise _Unusable(f"{shlex.join(compiler)} does not compile {source.parent.name}/{source.name}: {first}")
        if not linked.exists():
            raise _Unusable(f"{shlex.join(compiler)} reports success and has written no library")
        linked.chmod(0o700)
        os.replace(linked, path)
    took = time.monotonic() - start
    _log.info("%s: compiled for this CPU in %.1f s, kept in %s", source.parent.name, took, path.parent)


@functools.cache
def _compiler() -> list[str]:
    chosen = os.environ.get("CXX", "").strip()
    if chosen:
        try:
            command = shlex.split(chosen)
        except ValueError as error:
            raise _Unusable(f"no C++ compiler: the variable CXX is {chosen!r}: {error}") from None
        if shutil.which(command[0]) is None:
            raise _Unusable(f"no C++ compiler: the variable CXX names {command[0]}, which is not there")
        return command
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    raise _Unusable("no C++ compiler (looked for g++, clang++ and c++; the variable CXX may name another)")


@functools.cache
def _version(compiler: tuple[str, ...]) -> str:
    return _run(compiler, [*compiler, "--version"]).stdout


def _run(compiler: Sequence[str], command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="backslashreplace", timeout=_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _Unusable(f"{shlex.join(compiler)} does not run: {error}") from None


@functools.cache
def _processor() -> str:
    """Properties that `-march=native` depends on."""
    found = [platform.machine()]
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith(("model name", "flags", "Features", "CPU part")):
                found.append(line.strip())
            elif not line.strip() and len(found) > 1:
                break  # one processor is enough
    return "\n".join(found)


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Holds a file lock; the system releases it if the process dies."""
    import fcntl

    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
