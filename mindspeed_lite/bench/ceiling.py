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

from mindspeed_lite.bench.timing import Effort, time_one
from mindspeed_lite.ops.case import DTYPES as DTYPES
from mindspeed_lite.planner.devices import FIGURES
from mindspeed_lite.platform import cpu_matmul

_SIZES = (256, 512, 1024, 2048, 4096, 8192, 16384)
_MATMUL_SECONDS = 0.1  # of each size
_COPY_SECONDS = 0.5
# Larger than a last-level cache.
_COPY_BYTES = {"cpu": 1 << 28}
_COPY_BYTES_ELSEWHERE = 1 << 30

_SHEETS = {
    **dict.fromkeys(("H100", "H800"), FIGURES["h100-sxm"]),
    **dict.fromkeys(("A100", "A800"), FIGURES["a100"]),
    "H200": FIGURES["h200"],
    "910B": FIGURES["ascend-910b"],
}


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
    is_tf32 = dtype == torch.float32 and device == "cuda" and torch.backends.cuda.matmul.allow_tf32
    matmul = f"{name} matmul of {size} x {size}{' in tf32' * is_tf32}"
    source = f"measured: {matmul}, copy of {copied >> 20} MiB (read and write counted)"
    return Ceiling(best, _copy(device, copied), source)


def stated(measured: Ceiling, device_name: str, dtype: torch.dtype) -> Ceiling:
    """Ceiling for utilisation: the data sheet's dense 16-bit peak if known, or a higher measured rate."""
    is_other_card = any(each in device_name for each in ("PCIe", "NVL"))
    sheet = next((figures for part, figures in _SHEETS.items() if part in device_name and not is_other_card), None)
    if sheet is None or dtype.itemsize != 2 or sheet.flops <= measured.flops_per_second:
        return measured
    source = f"{sheet.source}: dense 16-bit peak; bandwidth {measured.source}"
    return replace(measured, flops_per_second=sheet.flops, source=source)


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
    timed = time_one(run, Effort(0.0, rounds=(1, 50), seconds=seconds, warmup=1), device)
    return min(sample.seconds for sample in timed.samples)


def main(device: str, dtype: str, threads: str) -> None:
    from mindspeed_lite import platform

    torch.set_num_threads(int(threads))
    chosen = platform.choose(device)
    with products_of_training(chosen.name):
        measured = measure(chosen.name, DTYPES[dtype])
    found = stated(measured, chosen.describe(), DTYPES[dtype])
    print(json.dumps({**asdict(found), "measured_flops_per_second": measured.flops_per_second}))


if __name__ == "__main__":
    main(*sys.argv[1:])
