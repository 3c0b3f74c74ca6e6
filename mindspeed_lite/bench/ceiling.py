"""The most this device reaches: floating-point operations per second of a large matmul, bytes of a large copy.

    python -m mindspeed_lite.bench.ceiling --dtype bf16 --threads 1

prints the figures as JSON. It is a process of its own, so that a benchmark can measure with the threads and the
environment of the job and without its memory.

The figures are those of plain PyTorch, not of the hardware: what an operator is compared with is what a user could
get. The copy counts a read and a write; what a write costs beyond (a CPU may read the line first) is not counted.
A tensor that fits in a cache can beat the copy, which is far larger than any.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from mindspeed_lite.platform import cpu_matmul

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}

# Square matmuls of growing size, until the next would take too long: small ones do not fill a large device, and
# large ones do not end on a small one.
_SIZES = (256, 512, 1024, 2048, 4096, 8192, 16384)
_MATMUL_SECONDS = 1.2
_COPY_SECONDS = 0.5
# Well beyond the last-level cache of a CPU (some have a gigabyte over all sockets, but not for one process) or GPU.
_COPY_BYTES = {"cpu": 1 << 28}
_COPY_BYTES_ELSEWHERE = 1 << 30

# Dense peaks per second, by part of the device's name; the first that fits counts, so the special stands before
# the general. NVIDIA: data sheets, whose larger figures are for sparse matrices. Ascend: cube cores x clock x 8192
# (16 x 16 x 16 multiply-adds) from the platform configuration that CANN ships for the chip; there is no sheet.
_H100 = {"16 bit": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12, "fp64": 66.9e12}
_A100 = {"16 bit": 312e12, "tf32": 156e12, "fp32": 19.5e12, "fp64": 19.5e12}
_KNOWN: tuple[tuple[str, dict[str, float], str], ...] = (
    ("H100 PCIe", {"16 bit": 756e12, "tf32": 378e12, "fp32": 51.2e12, "fp64": 51.2e12}, "NVIDIA H100 PCIe"),
    ("H100 NVL", {"16 bit": 835e12, "tf32": 417e12, "fp32": 60e12, "fp64": 60e12}, "NVIDIA H100 NVL"),
    ("H200 NVL", {"16 bit": 835e12, "tf32": 417e12, "fp32": 60e12, "fp64": 60e12}, "NVIDIA H200 NVL"),
    ("H100", _H100, "NVIDIA H100 SXM"),
    ("H200", _H100, "NVIDIA H200 SXM"),
    ("H800", {"16 bit": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12}, "NVIDIA H800 SXM"),
    ("A100", _A100, "NVIDIA A100"),
    ("A800", _A100, "NVIDIA A800"),
    ("V100", {"fp16": 125e12, "fp32": 15.7e12, "fp64": 7.8e12}, "NVIDIA V100 SXM2"),
    ("910B2", {"16 bit": 353.9e12}, "Ascend 910B2"),
)


@dataclass(frozen=True)
class Ceiling:
    """What one process can reach at most, and where the figures are from."""

    flops_per_second: float
    bytes_per_second: float
    source: str


@dataclass(frozen=True)
class Peak:
    """A dense peak by the vendor's own account."""

    flops_per_second: float
    source: str


@contextlib.contextmanager
def products_of_training(device: str) -> Iterator[None]:
    """Matrix products as the device layer has them, without the rest of it."""
    undo = cpu_matmul.install() if device == "cpu" else lambda: None
    try:
        yield
    finally:
        undo()


def measure(device: str, dtype: torch.dtype) -> Ceiling:
    """The best of a large matmul and a large copy in plain PyTorch; about two seconds on two cores."""
    best, size = _matmul(device, dtype)
    copied = _COPY_BYTES.get(device, _COPY_BYTES_ELSEWHERE)
    bandwidth = _copy(device, copied)
    name = str(dtype).removeprefix("torch.")
    precision = " in tf32" if device == "cuda" and _kind(device, dtype) == "tf32" else ""
    return Ceiling(
        best,
        bandwidth,
        f"measured: {name} matmul of {size} x {size}{precision}, copy of {copied >> 20} MiB (read and write counted)",
    )


def known(device_name: str, dtype: torch.dtype, device: str = "cuda") -> Peak | None:
    """The vendor's dense peak of a device of that name, or None where none is recorded here."""
    kind = _kind(device, dtype)
    for part, peaks, title in _KNOWN:
        if part.lower() in device_name.lower():
            figure = peaks.get(kind)
            if figure is None and kind in ("bf16", "fp16"):
                figure = peaks.get("16 bit")
            whose = "CANN's platform configuration" if title.startswith("Ascend") else "data sheet"
            return None if figure is None else Peak(figure, f"{title}, {whose}: dense {kind} peak")
    return None


def for_utilisation(measured: Ceiling, device_name: str, dtype: torch.dtype, device: str = "cuda") -> Ceiling:
    """The ceiling to state utilisation against: the vendor's peak, unless a matmul here has beaten it."""
    peak = known(device_name, dtype, device)
    if peak is None or peak.flops_per_second <= measured.flops_per_second:
        return measured
    source = f"{peak.source}; bandwidth {measured.source}"
    return replace(measured, flops_per_second=peak.flops_per_second, source=source)


def synchronizer(device: str) -> Callable[[], None]:
    """A function that returns when everything sent to the device is done."""
    if device == "cpu":
        return lambda: None
    module: Any = getattr(torch, device)
    wait: Callable[[], None] = module.synchronize
    return wait


def _kind(device: str, dtype: torch.dtype) -> str:
    if dtype == torch.float32 and device == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return next((name for name, each in DTYPES.items() if each == dtype), str(dtype))


def _matmul(device: str, dtype: torch.dtype) -> tuple[float, int]:
    """(floating-point operations per second, size) of the fastest square matmul."""
    best, best_size, left = 0.0, _SIZES[0], _MATMUL_SECONDS
    for size in _SIZES:
        operations = 2.0 * size**3
        if best and 2 * operations / best > left:
            break  # a warm-up and one repetition would not fit any more
        a = torch.randn(size, size, device=device, dtype=torch.float32).to(dtype)
        b = torch.randn(size, size, device=device, dtype=torch.float32).to(dtype)
        out = torch.empty(size, size, device=device, dtype=dtype)
        start = time.perf_counter()
        seconds = _best_time(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device, left / 2)  # type: ignore[misc]
        left -= time.perf_counter() - start
        if operations / seconds > best:
            best, best_size = operations / seconds, size
    return best, best_size


def _copy(device: str, size: int) -> float:
    """Bytes per second, read and written, of a copy of `size` bytes."""
    source = torch.ones(size, device=device, dtype=torch.uint8)
    target = torch.zeros(size, device=device, dtype=torch.uint8)
    return 2 * size / _best_time(lambda: target.copy_(source), device, _COPY_SECONDS)


def _best_time(run: Callable[[], object], device: str, budget: float) -> float:
    """The shortest of several runs after one that does not count; stops at `budget` seconds or 50 runs."""
    synchronize = synchronizer(device)
    synchronize()
    deadline = time.perf_counter() + budget
    run()
    synchronize()
    best = float("inf")
    for _ in range(50):
        start = time.perf_counter()
        run()
        synchronize()
        end = time.perf_counter()
        best = min(best, end - start)
        if end > deadline:
            break
    return best


def main(arguments: list[str] | None = None) -> int:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m mindspeed_lite.bench.ceiling", description=main.__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda", "npu"), default="cpu", help="default: %(default)s")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="default: %(default)s")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of an operation; default: PyTorch's choice")
    options = parser.parse_args(arguments)
    if options.threads is not None:
        if options.threads < 1:
            parser.error(f"--threads: want at least 1, not {options.threads}")
        torch.set_num_threads(options.threads)
    from mindspeed_lite import platform

    try:
        device = platform.choose(options.device)
    except platform.DeviceError as error:
        parser.error(f"--device: {error}")
    dtype = DTYPES[options.dtype]
    with products_of_training(device.name):
        measured = measure(device.name, dtype)
    stated = for_utilisation(measured, device.describe(), dtype, device.name)
    print(json.dumps({**asdict(stated), "measured_flops_per_second": measured.flops_per_second}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
