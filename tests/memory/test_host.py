"""Host memory on CPU: mapped files without a name on disk that reserve what they take and can leave memory."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_lite.memory import host

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(host.FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (70_000,)])
def test_a_tensor_is_one_like_others_and_has_no_name_on_disk(
    shape: tuple[int, ...], dtype: torch.dtype, folder: Path
) -> None:
    tensor = host.empty(torch.Size(shape), dtype, CPU)
    assert tensor.shape == torch.Size(shape) and tensor.dtype == dtype and tensor.is_contiguous()
    assert not list(folder.iterdir())
    expected = torch.randint(0, 100, shape).to(dtype)
    tensor.copy_(expected)
    host.release([tensor])
    assert torch.equal(tensor, expected)


def test_cuda_maps_no_more_than_a_tensor_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped: dict[int, int] = {}
    owners: list[Any] = []

    def as_tensor(owner: Any, device: torch.device) -> torch.Tensor:
        owners.append(owner)
        given = owner.__cuda_array_interface__
        return torch.frombuffer((ctypes.c_uint8 * given["shape"][0]).from_address(given["data"][0]), dtype=torch.uint8)

    calls = {
        "cudaHostRegister": lambda address, size, flags: mapped.update({address: size}) or 0,
        "cudaHostUnregister": mapped.pop,
    }
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(**calls))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    page = os.sysconf("SC_PAGE_SIZE")
    tensor = host.empty(torch.Size([3 * page]), torch.float32, torch.device("cuda"))
    tensor.fill_(1.0)
    assert mapped == {tensor.data_ptr(): 12 * page} and tensor.data_ptr() % page == 0
    owners.clear()
    assert not mapped
    calls["cudaHostRegister"] = lambda *_: 2
    with pytest.raises(MemoryError, match="does not map"):
        host.empty(torch.Size([8]), torch.float32, torch.device("cuda"))


# Resident memory in MiB before and after what is written is released, and the sum of it all read again.
PROBE = """
    import torch
    from mindspeed_lite.memory import host
    def resident():
        with open("/proc/self/status") as status:
            return sum(int(line.split()[1]) for line in status if line.startswith(("RssAnon", "RssFile"))) // 1024
    tensor = host.empty(torch.Size([64 << 20]), torch.float32, torch.device("cpu"))
    tensor.fill_(1.0)
    full = resident()
    host.release([tensor])
    print(full - resident(), int(tensor[::4096].sum()))
"""


def run(script: str, folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, host.FOLDER_VARIABLE: str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment, stdout=subprocess.PIPE, text=True
    )


def test_what_is_released_leaves_memory_and_comes_back(folder: Path) -> None:
    out, _ = run(PROBE, folder).communicate(timeout=600)
    left, total = map(int, out.split())
    assert left >= 250 and total == (64 << 20) // 4096


def test_a_process_that_is_killed_leaves_no_file(folder: Path) -> None:
    process = run(PROBE.replace("print(", "print('there', flush=True); import time; time.sleep(60); print("), folder)
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not list(folder.iterdir())


def test_a_full_disk_is_an_error_at_once_and_takes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryError, match=r"no 4,000 bytes of host memory: .*No space left on device"):
        host.empty(torch.Size([1000]), torch.float32, CPU)
    assert not list(folder.iterdir()) and set(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_cannot_serve_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert host.why_not("cpu") == []
    mounts = tmp_path_factory.mktemp("proc") / "mounts"
    mounts.write_text(f"disk / ext4 rw 0 0\nmem {folder} tmpfs rw 0 0\n")
    monkeypatch.setattr(host, "_MOUNTS", mounts)
    (reason,) = host.why_not("cpu")
    assert reason == f"{folder} is a tmpfs, which is memory itself: let {host.FOLDER_VARIABLE} name a folder on a disk"
    mounts.unlink()
    assert host.why_not("cpu") == []
    monkeypatch.setenv(host.FOLDER_VARIABLE, str(folder / "missing"))
    (reason,) = host.why_not("cpu")
    assert reason.endswith(f"is no folder that can be written: let {host.FOLDER_VARIABLE} name one")
