"""Peak FLOP/s of a large matmul and bytes/s of a large copy in plain PyTorch.

`python -m mindspeed_lite.bench.ceiling DEVICE DTYPE THREADS` prints JSON. A copy counts a read and a write; a tensor in
cache can be faster.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import torch

from mindspeed_lite.bench.timing import Effort, time_interleaved
from mindspeed_lite.ops.case import DTYPES as DTYPES
from mindspeed_lite.ops.case import dtype_name
from mindspeed_lite.platform import cpu_matmul

_SIZES = (256, 512, 1024, 2048, 4096, 8192, 16384)
_MATMUL_SECONDS = 0.1  # of each size
_COPY_SECONDS = 0.5
# Larger than a last-level cache.
_COPY_BYTES = {"cpu": 1 << 28}
_COPY_BYTES_ELSEWHERE = 1 << 30

# Dense peaks per second, by device name. NVIDIA: data sheets without sparsity. Ascend: cube cores x clock x 8192 from
# CANN's platform configuration.
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
    flops_per_second: float
    bytes_per_second: float
    source: str


@contextlib.contextmanager
def products_of_training(device: str) -> Iterator[None]:
    undo = cpu_matmul.install() if device == "cpu" else lambda: None
    try:
        yield
    finally:
        undo()


def measure(device: str, dtype: torch.dtype) -> Ceiling:
    best, size = _matmul(device, dtype)
    copied = _COPY_BYTES.get(device, _COPY_BYTES_ELSEWHERE)
    name = str(dtype).removeprefix("torch.")
    precision = " in tf32" if _kind(device, dtype) == "tf32" else ""
    source = (
        f"measured: {name} matmul of {size} x {size}{precision}, copy of {copied >> 20} MiB (read and write counted)"
    )
    return Ceiling(best, _copy(device, copied), source)


def stated(measured: Ceiling, device_name: str, dtype: torch.dtype, device: str = "cuda") -> Ceiling:
    """Return `measured` with the vendor's dense FLOP/s peak where that is known and higher."""
    kind = _kind(device, dtype)
    for part, peaks, title in _KNOWN:
        if part.lower() in device_name.lower():
            flops = peaks.get(kind) or (peaks.get("16 bit") if kind in ("bf16", "fp16") else None)
            if flops is None or flops <= measured.flops_per_second:
                break
            whose = "CANN's platform configuration" if title.startswith("Ascend") else "data sheet"
            source = f"{title}, {whose}: dense {kind} peak; bandwidth {measured.source}"
            return replace(measured, flops_per_second=flops, source=source)
    return measured


def _kind(device: str, dtype: torch.dtype) -> str:
    is_tf32 = dtype == torch.float32 and device == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if is_tf32 else dtype_name(dtype)


def _matmul(device: str, dtype: torch.dtype) -> tuple[float, int]:
    best, best_size = 0.0, 0
    for size in _SIZES:
        operations = 2.0 * size**3
        if best and operations / best > 2 * _MATMUL_SECONDS:
            break
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        run = functools.partial(torch.mm, a, b, out=torch.empty_like(a))
        rate = operations / _best_seconds(run, device, _MATMUL_SECONDS)
        if rate > best:
            best, best_size = rate, size
    return best, best_size


def _copy(device: str, size: int) -> float:
    source = torch.ones(size, device=device, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return 2 * size / _best_seconds(lambda: target.copy_(source), device, _COPY_SECONDS)


def _best_seconds(run: Callable[[], object], device: str, seconds: float) -> float:
    timed, errors = time_interleaved({"": run}, Effort(0.0, rounds=(1, 50), seconds=seconds, warmup=1), device)
    if errors:
        raise RuntimeError(errors[""])
    return min(sample.seconds for sample in timed[""].samples)


def main(device: str, dtype: str, threads: str) -> None:
    from mindspeed_lite import platform

    torch.set_num_threads(int(threads))
    chosen = platform.choose(device)
    with products_of_training(chosen.name):
        measured = measure(chosen.name, DTYPES[dtype])
    found = stated(measured, chosen.describe(), DTYPES[dtype], chosen.name)
    print(json.dumps({**asdict(found), "measured_flops_per_second": measured.flops_per_second}))


if __name__ == "__main__":
    main(*sys.argv[1:])
