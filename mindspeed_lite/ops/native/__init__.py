"""Small C++ kernels for the CPU: compiled for this machine at first use, kept for the next process, called by address.

A kernel is one plain C++17 file beside the operator that it serves: no headers but those here, those beside it and the
standard library's, OpenMP for threads, loops that a compiler vectorises, functions that take pointers and sizes. That
compiles in a second or two, where a PyTorch extension takes a minute, and asks nothing of the machine but a
compiler. A machine without one has a reason (`Library.unusable`), and the operator goes another way.

Compiled libraries lie in the cache's folder (`platform/cache.py`), under a name that stands for sources, compiler,
flags, processor and PyTorch, and end in their own checksum: one that was cut short or altered is compiled again. Many
processes may ask at once: one compiles, the others wait for it.

OpenMP is that of PyTorch, which is loaded already: the library is linked without one of its own, so that both share
one pool of threads. GCC's calls are served by GCC's runtime and by LLVM's; clang's by LLVM's only. What PyTorch's
runtime does not serve is a reason, even where another runtime in the process would: two pools of threads compete.
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

from mindspeed_lite.ops.traced import with_memory
from mindspeed_lite.platform import cache

__all__ = ["Library", "numbers", "threads", "without_micro_kernel"]

_HEADERS = Path(__file__).parent
_TYPES: Mapping[str, Any] = {
    "p": ctypes.c_void_p,
    "l": ctypes.c_int64,
    "i": ctypes.c_int32,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}
# No flag that changes what arithmetic means: sums are reordered where the source says so (`omp simd reduction`).
_FLAGS = "-std=c++17 -O3 -march=native -fPIC -fopenmp -fno-math-errno -fno-trapping-math -ffp-contract=fast".split()
_TIMEOUT = 300.0
_CHECKSUM = hashlib.sha256().digest_size
# Elements of a pass over memory below which waking the threads costs more than they bring.
_SERIAL = 1 << 15

_log = logging.getLogger("mindspeed_lite")


class Library:
    """The functions of one C++ source.

    Args:
        source: the C++ file.
        functions: name -> one letter for each argument: p pointer, l int64, i int32, f float, d double. A tensor
            stands for its address, several in a list or tuple for an array of these. All of them return nothing.
            They are attributes of the object once `unusable` has answered None.
        uses_torch: the source calls functions that libtorch_cpu exports. One that this PyTorch does not have is a
            reason, and no crash.
        flags: for the compiler, after those that all have.
        returns_status: the functions return a status instead of nothing (`guard.h`), and what is none raises:
            MemoryError, or RuntimeError for whatever else a kernel met.
    """

    def __init__(
        self,
        source: Path,
        functions: Mapping[str, str],
        uses_torch: bool = False,
        flags: Sequence[str] = (),
        returns_status: bool = False,
    ) -> None:
        self.source = source
        self.returns_status = returns_status
        self.uses_torch = uses_torch
        self.flags = tuple(flags)
        self.functions = dict(functions)
        self._state: str | None = "not asked yet"
        self._loaded: ctypes.CDLL | None = None

    def unusable(self) -> str | None:
        """Why the library cannot be used here, or None; compiles it if need be."""
        if self._state == "not asked yet":
            self._state = self._load()
        return self._state

    def __getattr__(self, name: str) -> Any:
        # Reached only for what is not set yet.
        if name not in self.functions:
            raise AttributeError(f"{self.source.name} is not known to have {name!r}")
        reason = self.unusable()
        if reason is not None:
            raise RuntimeError(reason)
        return self.__dict__[name]

    def _load(self) -> str | None:
        operator = self.source.parent.name
        try:
            path = _compiled(self.source, self.uses_torch, self.flags)
            # All symbols now: what PyTorch may no longer have is a reason here, not a crash at the first call.
            self._loaded = ctypes.CDLL(str(path), mode=os.RTLD_NOW)
            for name, letters in self.functions.items():
                function = getattr(self._loaded, name)
                function.argtypes = [_TYPES[letter] for letter in letters]
                function.restype = _status if self.returns_status else None
                setattr(self, name, functools.partial(_call, function))
        except _Unusable as error:
            return str(error)
        except Exception as error:  # whatever a compiler, a file system or a loader does
            return f"the compiled CPU kernel of {operator} does not load: {' '.join(str(error).split())}"
        return None


def _address(tensor: torch.Tensor) -> int:
    return with_memory(tensor, tensor.data_ptr())


def _call(function: Callable[..., Any], *given: Any) -> None:
    passed: list[Any] = []
    for each in given:
        if isinstance(each, torch.Tensor):
            passed.append(_address(each))
        elif isinstance(each, (list, tuple)):
            passed.append((ctypes.c_void_p * len(each))(*map(_address, each)))
        else:
            passed.append(each)
    function(*passed)


class _Unusable(Exception):
    """The reason why there is no library."""


def numbers(values: Sequence[int]) -> Any:
    """int64 of C, as an argument of kind p."""
    return (ctypes.c_int64 * len(values))(*values)


def without_micro_kernel(library: Library, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Why a library that includes `brgemm.h` multiplies no numbers of `dtype` now, or None.

    The switch of `torch.backends.mkldnn` may change between calls; what the processor has does not.
    """
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
    """What a kernel's status means (`guard.h`)."""
    if code:
        raise MemoryError("a CPU kernel found no memory") if code == 1 else RuntimeError("a CPU kernel failed")


def threads(work: int) -> int:
    """How many threads a pass over `work` elements is worth."""
    return 1 if work < _SERIAL else torch.get_num_threads()


def _compiled(source: Path, uses_torch: bool, flags: Sequence[str] = ()) -> Path:
    """The compiled library of `source`, made if it is not there yet."""
    text = source.read_bytes()
    headers = sorted({*_HEADERS.glob("*.h"), *source.parent.glob("*.h")})
    parts = [text, *(header.read_bytes() for header in headers), _processor().encode()]
    compiler = _compiler()
    # It is loaded already, so that its name alone is looked up when ours is; also for nothing but weak symbols.
    links = [f"-L{Path(torch.__file__).parent / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu"] if uses_torch else []
    flags = (*_FLAGS, *flags)
    parts += [part.encode() for part in (*compiler, _version(tuple(compiler)), *flags, *links, _torch())]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    try:
        folder = cache.folder()
    except cache.NoCache as error:
        raise _Unusable(f"no folder to keep compiled kernels in ({error})") from None
    path = folder / f"{source.parent.name}-{digest}.so"
    if not _is_whole(path):
        with _alone(folder / f"{path.name}.lock"):
            if not _is_whole(path):
                _compile(compiler, source, flags, links, path)
    return path


def _is_whole(path: Path) -> bool:
    """Whether there is a library that ends in its own checksum and that no other user can have written.

    A loader maps a file without reading it: one that was cut short ends the process.
    """
    try:
        with open(path, "rb") as file:
            found, text = os.fstat(file.fileno()), file.read()
    except FileNotFoundError:
        return False
    if hasattr(os, "getuid") and found.st_uid != os.getuid():
        raise _Unusable(
            f"the compiled CPU kernel {path} belongs to another user, whose code would be loaded: delete it"
        )
    writable = os.name == "posix" and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return not writable and text[-_CHECKSUM:] == _checksum(text[:-_CHECKSUM])


def _checksum(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


def _compile(compiler: list[str], source: Path, flags: Sequence[str], links: list[str], path: Path) -> None:
    if _calls_llvm_openmp(tuple(compiler)) and not _torch_has_llvm_openmp():
        raise _Unusable(
            f"{shlex.join(compiler)} calls LLVM's OpenMP runtime, and this PyTorch has GCC's: install g++, or let the "
            "variable CXX name it"
        )
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        unlinked, linked = Path(scratch) / "kernel.o", Path(scratch) / "kernel.so"
        # In two steps: with -fopenmp the second would bring an OpenMP of its own.
        for command in (
            [*compiler, *flags, f"-I{_HEADERS}", "-c", str(source), "-o", str(unlinked)],
            [*compiler, "-shared", str(unlinked), *links, "-o", str(linked)],
        ):
            done = _run(compiler, command)
            if done.returncode:
                said = (done.stderr or done.stdout).strip().splitlines()
                first = next((line for line in said if "error" in line), said[0] if said else "no message")
                raise _Unusable(f"{shlex.join(compiler)} does not compile {source.parent.name}/{source.name}: {first}")
        try:
            text = linked.read_bytes()
        except FileNotFoundError:
            raise _Unusable(f"{shlex.join(compiler)} reports success and has written no library") from None
        with open(linked, "ab") as file:
            file.write(_checksum(text))
        linked.chmod(0o700)
        os.replace(linked, path)
    took = time.monotonic() - start
    _log.info("%s: compiled for this CPU in %.1f s, kept in %s", source.parent.name, took, path.parent)


@functools.cache
def _compiler() -> list[str]:
    """The C++ compiler's command."""
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


def _torch() -> str:
    """What a library that uses PyTorch's functions and threads depends on."""
    return f"{torch.__version__} {torch.version.git_version} {_torch_has_llvm_openmp()}"


@functools.cache
def _calls_llvm_openmp(compiler: tuple[str, ...]) -> bool:
    """Whether the compiler's OpenMP code calls LLVM's runtime, as clang's does; False if it compiles none at all."""
    source = 'extern "C" void call(int* x) {\n#pragma omp parallel\n++*x;\n}\n'
    return "__kmpc_" in _run(compiler, [*compiler, "-fopenmp", "-x", "c++", "-S", "-", "-o", "-"], source).stdout


@functools.cache
def _torch_has_llvm_openmp() -> bool:
    """Whether the OpenMP runtime that PyTorch is linked with serves the calls that clang makes."""
    try:
        loaded = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return False
    # Looked up in this library and those it is linked with, not in all of the process.
    return hasattr(loaded, "__kmpc_fork_call")


@functools.cache
def _version(compiler: tuple[str, ...]) -> str:
    return _run(compiler, [*compiler, "--version"]).stdout


def _run(compiler: Sequence[str], command: Sequence[str], given: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command of the compiler's; its messages may be in any encoding."""
    try:
        return subprocess.run(
            command, input=given, capture_output=True, text=True, errors="backslashreplace", timeout=_TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _Unusable(f"{shlex.join(compiler)} does not run: {error}") from None


@functools.cache
def _processor() -> str:
    """What `-march=native` depends on."""
    found = [platform.machine()]
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith(("model name", "flags", "Features", "CPU part")):
                found.append(line.strip())
            elif not line.strip() and len(found) > 1:
                break  # the processors of a machine are alike
    return "\n".join(found)


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Within the block no other process holds `lock`; the system lets go of it when its holder dies."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system: the worst case is that two processes compile the same
        yield
        return
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
