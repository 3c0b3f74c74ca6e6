"""`mindspeed_lite.sleep` and `wake` against copies of as many bytes, in turn, in one process.

The plain copies fill existing host tensors and free their sources, then allocate and fill new ones.
"""

from __future__ import annotations

import statistics
import sys

import torch

import mindspeed_lite
from benchmarks.harness import Benchmark, Options, Row
from mindspeed_lite.bench.wording import seconds, size
from mindspeed_lite.platform import allocator
from mindspeed_lite.platform.timer import seconds_of

_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _trained(layers: int, width: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Matrices in fp32 with their moments."""
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers))).to(_DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, width, device=_DEVICE)).sum().backward()
    optimizer.step()
    return model, optimizer


def _host_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=_DEVICE.type == "cuda")


def _ratio(found: dict[str, list[float]], plain: str, ours: str) -> float:
    """Median over cycles, since neighbours in time share what else the machine does."""
    return statistics.median(one / other for one, other in zip(found[plain][1:], found[ours][1:], strict=True))


def _measure(options: Options) -> list[Row]:
    # Else what glibc gives back to the kernel decides, by the order of addresses.
    allocator.keep_freed_memory()
    model, optimizer = _trained(options.layers, options.width)
    moved = [
        *model.parameters(),
        *(state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")),
    ]
    copies = [each.detach().clone() for each in moved]
    nbytes, hosts = sum(each.nbytes for each in copies), [_host_like(each) for each in copies]
    found: dict[str, list[float]] = {"sleep": [], "copy out": [], "wake": [], "copy back": []}

    def copy_out() -> None:
        for host, source in zip(hosts, copies, strict=True):
            host.copy_(source, non_blocking=True)
        copies.clear()

    def copy_back() -> None:
        copies.extend(torch.empty_like(host, device=_DEVICE).copy_(host, non_blocking=True) for host in hosts)

    for _ in range(options.cycles + 1):
        found["copy out"].append(seconds_of(copy_out, _DEVICE))
        found["copy back"].append(seconds_of(copy_back, _DEVICE))
        found["sleep"].append(seconds_of(lambda: mindspeed_lite.sleep(model, optimizer), _DEVICE))
        found["wake"].append(seconds_of(mindspeed_lite.wake, _DEVICE))
    # The first cycle allocates host memory.
    times = {name: statistics.median(each[1:]) for name, each in found.items()}
    return [
        {"what": ours, "bytes": nbytes, "ours": times[ours], "plain": times[plain], "ratio": _ratio(found, plain, ours)}
        for ours, plain in (("sleep", "copy out"), ("wake", "copy back"))
    ]


BENCHMARK = Benchmark(
    name="sleep",
    title="Sleep and wake",
    about="{layers} fp32 matrices of {width} x {width} with two moments each, {cycles} cycles after one that allocates "
    "host memory.",
    columns={
        "call": lambda row: row["what"],
        "moved": lambda row: size(row["bytes"]),
        "time": lambda row: seconds(row["ours"]),
        "plain copy": lambda row: seconds(row["plain"]),
        "speed of a plain copy": lambda row: f"{row['ratio']:.2f}",
    },
    measure=_measure,
    options={"layers": 24, "width": 2048, "cycles": 8},
    tiny={"layers": 2, "width": 64, "cycles": 1},
    note="Medians; on a CPU with the allocator of `mindspeed-lite run`. Sleep drops gradients, which the copies leave "
    "alone; wake fills them with zeros.",
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
