"""Predicts times of Triton kernels from their machine code, without a GPU: `python -m lab.gpu_static`.

Writes docs/benchmarks/gpu-static.json and its page, with Liger's kernels where liger-kernel is installed.
--published CSV: Liger's benchmark data, for the error of the predictions.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from lab import launches
from lab.launches import Launch
from lab.sass import Kernel, compile_launch
from mindspeed_lite.ops.grouped_matmul import grouped_matmul

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks" / "gpu-static.md"
# Shapes of trainings: Llama 8B, DeepSeek-V3's layers and a 64-expert router.
SHAPES = {
    "rms_norm": ("16384x4096",),
    "layer_norm": ("16384x4096",),
    "cross_entropy": ("4096x128256",),
    "activation": ("8192x28672",),
    "rope": ("s=4096,b=2,n=32,d=128",),
    "permute": ("8192x7168x256x8",),
    "moe_router": ("4096x64x6", "4096x64x6,pre=1"),
    "adamw": ("4x67108864",),
    "grouped_matmul": ("32768x2048x1536x64",),
}
# Bytes per second of a large copy, clock in Hz, issue slots and special function lanes a cycle and multiprocessor.
BANDWIDTH, CLOCK, SLOTS, SPECIAL = 3.0e12, 1.7e9, 4, 16
LATENCY, LAUNCH = 800e-9, 2e-6  # seconds
# Published benchmark -> operator, shape from the swept value, dtype.
PUBLISHED: dict[str, tuple[str, Callable[[int], str], torch.dtype]] = {
    "megatron_rms_norm": ("rms_norm", lambda x: f"4096x{x}", torch.bfloat16),
    "layer_norm": ("layer_norm", lambda x: f"4096x{x}", torch.float32),
    "megatron_swiglu": ("activation", lambda x: f"8192x{2 * x}", torch.bfloat16),
}


def traffic(launch: Launch, kernel: Kernel, least: int) -> int:
    """Bytes that a launch moves; `least` where it gets its tensors by address."""
    named = sum(size * kernel.passes.get(name, 0) for name, size in launch.sizes.items())
    return least if set(launch.sizes) & {"addresses", "weights_ptr"} else named


def executed(launch: Launch, kernel: Kernel, size: int) -> tuple[float, float]:
    """Instructions, and those on the special function unit, of all warps; loops run until `size` bytes moved."""
    warps = launch.programs * kernel.warps
    outside = kernel.once.bytes - kernel.loops.bytes
    if kernel.loops.bytes:
        times = max((size / warps - outside) / kernel.loops.bytes, 1.0)
        part = 1.0
    else:
        times = 1.0
        # Of two branches, of whole and of last blocks, one runs.
        part = min(1.0, size / warps / kernel.once.bytes) if "addresses" in launch.sizes else 1.0
    counts = [
        part * warps * (once - loop + times * loop)
        for once, loop in ((kernel.once.issued, kernel.loops.issued), (kernel.once.special, kernel.loops.special))
    ]
    return counts[0], counts[1]


def seconds(launch: Launch, kernel: Kernel, least: int) -> float | None:
    """Predicted time of a launch on an H100: the slowest of memory, issue and special functions; None for a GEMM."""
    if kernel.once.tensor:
        return None
    size = traffic(launch, kernel, least)
    issued, special = executed(launch, kernel, size)
    per_second = launches.MULTIPROCESSORS * CLOCK
    resident = min(kernel.programs * launches.MULTIPROCESSORS, launch.programs) * kernel.warps
    in_flight = resident * (kernel.loops.bytes or kernel.once.bytes)
    bandwidth = min(BANDWIDTH, in_flight / LATENCY)
    return LAUNCH + max(size / bandwidth, issued / (SLOTS * per_second), 32 * special / (SPECIAL * per_second))


def measure(
    operator: str, text: str, dtype: torch.dtype, function: Any = None, arch: int = 90, backward: bool = True
) -> list[dict[str, Any]]:
    """One record per kernel of an operator at a shape."""
    shape = importlib.import_module(f"mindspeed_lite.ops.{operator}.cases").CASES.parse(text)
    least = shape.work(dtype.itemsize)[0].bytes
    found = []
    for launch in launches.record(function or _ours(operator, shape), shape.make, dtype, backward):
        kernel = compile_launch(launch, arch)
        time = seconds(launch, kernel, least)
        size = traffic(launch, kernel, least)
        issued, special = executed(launch, kernel, size)
        # Elements moved by one thread of each warp.
        elements = size / dtype.itemsize / 32
        found.append({
            "operator": operator, "shape": text, "arch": arch, "kernel": launch.name,
            "registers": kernel.registers, "spills": kernel.spills, "shared": kernel.shared,
            "programs": kernel.programs, "code": kernel.once.issued,
            "instructions": round(issued / elements, 2) if time else None,
            "special": round(special / elements, 2) if time else None,
            "bytes": size if time else None, "microseconds": round(1e6 * time, 1) if time else None,
        })  # fmt: skip
    return found


def _ours(operator: str, shape: Any) -> Callable[..., Any]:
    if operator == "grouped_matmul":  # counts on the device
        return lambda x, *weights: grouped_matmul(
            x, weights, torch.empty(len(weights), dtype=torch.int64, device="cuda")
        )
    ours: Callable[..., Any] = shape.ours
    return ours


def liger() -> dict[str, Callable[..., Any]]:
    """Liger's functions of our inputs, by operator; empty where it is not installed."""
    try:
        ops: Any = importlib.import_module("liger_kernel.ops")
    except ImportError:
        return {}
    return {
        "rms_norm": lambda x, weight: ops.LigerRMSNormFunction.apply(x, weight, 1e-5, 0.0, "llama", False),
        "layer_norm": lambda x, weight, bias: ops.LigerLayerNormFunction.apply(x, weight, bias, 1e-5),
        "activation": lambda x: ops.LigerFusedGateUpSiLUMulFunction.apply(x, False),
        "cross_entropy": lambda logits, labels: importlib.import_module(
            "liger_kernel.ops.vocab_parallel_cross_entropy"
        ).LigerVocabParallelCEFunction.apply(logits[:, None], labels[:, None], None, -100, 0.0, "megatron", "disabled"),
    }


def total(rows: Iterable[dict[str, Any]]) -> float | None:
    times = [row["microseconds"] for row in rows]
    return round(sum(times), 1) if times and None not in times else None


def published_ratios(path: Path) -> dict[str, list[float]]:
    """By benchmark, predicted over published time of Liger's forward passes on an H100."""
    found: dict[str, list[float]] = {}
    with path.open() as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["kernel_name"] in PUBLISHED
            and (row["kernel_provider"], row["metric_name"]) == ("liger", "speed")
            and row["kernel_operation_mode"] == "forward"
            and "H100 80GB HBM3" in row["gpu_name"]
        ]
    for row in rows:
        operator, shape, dtype = PUBLISHED[row["kernel_name"]]
        rows_of = measure(operator, shape(int(row["x_value"])), dtype, liger()[operator], backward=False)
        predicted = total(rows_of)
        assert predicted is not None
        found.setdefault(row["kernel_name"], []).append(round(predicted / (1e3 * float(row["y_value_50"])), 3))
    return found


def page(table: dict[str, Any]) -> str:
    errors = [abs(each - 1) for ratios in table["published"].values() for each in ratios]
    lines = [
        "# Predicted times of CUDA kernels",
        "",
        "**These are predictions, not measurements.** `python -m lab.gpu_static` compiles Triton kernels for sm_90",
        "and sm_100 and counts the instructions of its machine code. The time on an H100 is the longest of its memory",
        "traffic, issue slots and special functions, plus 2 us a launch. Loops are counted by the bytes they move.",
        "Measured times: [one H100](gpu/h100.md).",
        "",
        "## Error",
        "",
    ]
    if errors:
        lines += [
            f"Predicted over published time of Liger's forward passes on an H100 ({len(errors)} shapes): median error",
            f"{100 * statistics.median(errors):.0f} %, largest {100 * max(errors):.0f} %.",
            "The error covers forward passes only. Backward is less certain: for Liger's rms_norm 16384x4096 the",
            "prediction is 137 us and [the measurement](gpu/h100.md) 246 us. Bandwidth is that of a measured copy",
            "(3.0 TB/s); clock (1.7 GHz), latency (800 ns) and launch (2 us) are assumed, not fitted.",
            "",
            "| Benchmark of Liger-Kernel | Predicted over published, by growing size |",
            "| --- | --- |",
            *(
                f"| {name} | {', '.join(f'{each:.2f}' for each in ratios)} |"
                for name, ratios in table["published"].items()
            ),
        ]
    lines += [
        "",
        "## Operators",
        "",
        "Sum of an operator's kernels, forward and backward, bf16, without PyTorch's own. A lead below the error above",
        "decides nothing.",
        "",
        "| Operator | Shape | Ours | Liger's | Shorter |",
        "| --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for operator, shapes in SHAPES.items():
        for shape in shapes:
            ours, theirs = (
                total(
                    row for row in table[who] if (row["shape"], row["operator"], row["arch"]) == (shape, operator, 90)
                )
                for who in ("ours", "liger")
            )
            shorter = _shorter(ours, theirs, statistics.median(errors) if errors else 0.0)
            lines.append(f"| {operator} | {shape} | {_us(ours)} | {_us(theirs)} | {shorter} |")
    for who, title in (("ours", "Our kernels"), ("liger", "Liger's kernels")):
        lines += [
            "",
            f"## {title}",
            "",
            "Instructions and special functions: of a thread, per element moved. CTAs: per multiprocessor.",
            "",
            "| Kernel | Shape | sm | Registers | Spills | Shared | CTAs | Instructions | Special | us |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        lines += [
            f"| {row['kernel']} | {row['shape']} | {row['arch']} | {row['registers']} | {row['spills']} "
            f"| {row['shared']} | {row['programs']} | {_or_dash(row['instructions'])} | {_or_dash(row['special'])} "
            f"| {_or_dash(row['microseconds']) if row['arch'] == 90 else '-'} |"
            for row in table[who]
        ]
    return "\n".join(lines) + "\n"


def _shorter(ours: float | None, theirs: float | None, error: float) -> str:
    if ours is None or theirs is None:
        return "-"
    if abs(ours - theirs) <= error * min(ours, theirs):
        return "undecided"
    return "ours" if ours < theirs else "Liger's"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} us"


def _or_dash(value: float | None) -> str:
    return "-" if value is None else str(value)


def ours() -> list[dict[str, Any]]:
    return [
        row
        for operator, shapes in SHAPES.items()
        for shape in shapes
        for arch in (90, 100)
        for row in measure(operator, shape, torch.bfloat16, arch=arch)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--published", type=Path, metavar="CSV", help="Liger's benchmark/data/all_benchmark_data.csv")
    parser.add_argument("--check", action="store_true", help="print our kernels as JSON; write nothing")
    given = parser.parse_args()
    launches.install()
    if given.check:
        print(json.dumps(ours()))
        return
    path = PAGE.with_suffix(".json")
    table = json.loads(path.read_text()) if path.exists() else {"published": {}, "liger": []}
    table["ours"] = ours()
    if liger():
        table["liger"] = [
            row
            for operator, function in liger().items()
            for row in measure(operator, SHAPES[operator][0], torch.bfloat16, function)
        ]
        if given.published:
            table["published"] = published_ratios(given.published)
    path.write_text(json.dumps(table, indent=1) + "\n")
    PAGE.write_text(page(table))
    errors = [abs(each - 1) for ratios in table["published"].values() for each in ratios]
    if errors:
        print(f"median error {100 * statistics.median(errors):.0f} %, largest {100 * max(errors):.0f} %")
    print(PAGE)


if __name__ == "__main__":
    main()
