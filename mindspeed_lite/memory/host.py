"""Allocates host memory that device kernels read and write directly.

CPU     a mapped file, unlinked at once: unused pages can leave memory.
CUDA    registered pages as a device tensor (unified virtual addressing).
NPU     `torch_npu.empty_with_swapped_memory`.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from mindspeed_lite.ops import traced

FOLDER_VARIABLE = "MINDSPEED_LITE_SWAP"

_IN_MEMORY = ("tmpfs", "ramfs")
_MOUNTS = Path("/proc/mounts")
_DONTNEED = 4  # of <sys/mman.h>


def why_not(device: str) -> list[str]:
    if device == "cpu":
        folder = _folder()
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
            return [f"{folder} is no folder that can be written: let {FOLDER_VARIABLE} name one"]
        kind = _kind_of(Path(folder))
        if kind in _IN_MEMORY:
            return [f"{folder} is a {kind}, which is memory itself: let {FOLDER_VARIABLE} name a folder on a disk"]
        return []
    if device == "npu" and not hasattr(importlib.import_module("torch_npu"), "empty_with_swapped_memory"):
        return ["this torch_npu has no empty_with_swapped_memory"]
    return []


def empty(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialized contiguous device tensor in host memory. Raises MemoryError."""
    if traced.dry:
        return torch.empty(shape, dtype=dtype)
    try:
        if device.type == "cpu":
            return file(shape, dtype)
        if device.type == "cuda":
            return _pinned(shape, dtype, device)
        torch_npu = importlib.import_module("torch_npu")
        return torch_npu.empty_with_swapped_memory(list(shape), dtype=dtype, device=device)  # type: ignore[no-any-return]
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise MemoryError(f"no {shape.numel() * dtype.itemsize:,} bytes of host memory: {error}") from error


def release(tensors: Iterable[torch.Tensor]) -> None:
    """Lets pages of tensors from `empty` leave memory until their next read; CPU only."""
    for tensor in tensors:
        if tensor.device.type == "cpu" and not traced.dry:
            storage = tensor.untyped_storage()
            # A shared mapping reloads pages from the file.
            _madvise(storage.data_ptr(), storage.nbytes())


def file(shape: torch.Size, dtype: torch.dtype, folder: str | Path | None = None) -> torch.Tensor:
    """Uninitialized tensor in an unnamed file, which ends with it. Raises OSError."""
    size = shape.numel() * dtype.itemsize
    handle, name = tempfile.mkstemp(prefix="mindspeed-lite-", dir=folder or _folder())
    try:
        try:
            os.posix_fallocate(handle, 0, max(size, 1))
        finally:
            os.close(handle)
        return torch.from_file(name, shared=True, size=shape.numel(), dtype=dtype).view(shape)
    finally:
        os.unlink(name)


class _Pinned:
    """Pages that CUDA maps; PyTorch's own pinned memory would be rounded up to a power of two."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        size = -(-max(nbytes, 1) // page) * page
        self._memory = torch.empty(size + page, dtype=torch.uint8)
        self._device = device
        self.address = -(-self._memory.data_ptr() // page) * page
        if int(torch.cuda.cudart().cudaHostRegister(self.address, size, 0)):  # type: ignore[no-untyped-call]
            raise RuntimeError(f"CUDA does not map {size:,} bytes")
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }

    def __del__(self) -> None:
        # A tensor refers to this until its memory is freed; the process's end unmaps the rest.
        if hasattr(self, "__cuda_array_interface__") and not sys.is_finalizing():
            torch.cuda.synchronize(self._device)
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]


def _pinned(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    host = _Pinned(shape.numel() * dtype.itemsize, device)
    found = torch.as_tensor(host, device=device)
    if found.data_ptr() != host.address:
        raise RuntimeError("the device has another address for pinned memory than the host")
    return found.view(dtype).view(shape)


def _folder() -> str:
    return os.environ.get(FOLDER_VARIABLE) or tempfile.gettempdir()


def _kind_of(folder: Path) -> str:
    """File system type; empty if unknown."""
    try:
        mounts = [line.split()[1:3] for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return ""
    whole = folder.resolve()
    above = [(len(place), kind) for place, kind in mounts if whole.is_relative_to(place)]
    return max(above)[1] if above else ""


def _madvise(address: int, size: int) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    first = -(-address // page) * page
    length = (address + size - first) // page * page
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _DONTNEED)
