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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lab import launches, stamps
from lab.launches import Launch
from lab.sass import Count, Kernel, compile_launch
from mindspeed_lite.ops.grouped_matmul import grouped_matmul
from mindspeed_lite.ops.grouped_matmul.cases import counts
from mindspeed_lite.ops.row_kernels import cdiv

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks" / "gpu-static.md"
# Shapes of trainings: Llama 8B, DeepSeek-V3's layers and a 64-expert router.
SHAPES = {
    "rms_norm": ("16384x4096",),
    "layer_norm": ("16384x4096",),
    "cross_entropy": ("4096x128256",),
    "activation": ("8192x28672",),
    "rope": ("s=4096,b=2,n=32,d=128",),
    "permute": ("8192x4096x64x8",),
    "moe_router": ("4096x64x6,pre=1", "32768x256x8,scores=sigmoid,groups=8,group_topk=4,bias=1"),
    "adamw": ("4x67108864",),
    "grouped_matmul": ("32768x2048x1536x64",),
}
# Bytes per second of a large copy, clock in Hz, issue slots and special function lanes a cycle and multiprocessor.
BANDWIDTH, CLOCK, SLOTS, SPECIAL = 3.0e12, 1.7e9, 4, 16
LATENCY, LAUNCH = 800e-9, 2e-6  # seconds
PRODUCTS = 800e12  # operations per second of a large matrix product
# Cycles between two instructions of a warp, and the exponent that combines limits.
STALL, OVERLAP = 4, 4
# Where the least time does not decide which backend an operator has on CUDA.
KEPT = {
    "activation": "serves biases, weights per token, clamps and all kinds; Liger's are of two kinds without them",
    "grouped_matmul": "serves weights of experts that are not one tensor",
}
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


class Loops(NamedTuple):
    """Of a program: counts outside its loop and of one repeat, and how often that runs."""

    outside: Count
    inside: Count
    repeats: float


def loops(launch: Launch, kernel: Kernel, size: int, flops: float) -> Loops:
    """Loops run until `size` bytes moved or `flops` operations are done, or once per chosen expert."""
    once, inside = kernel.once, kernel.inner if kernel.inner.tensor else kernel.loops
    outside = Count(*(all_of - some for all_of, some in zip(once, inside, strict=True)))
    if inside.tensor:
        tile = 2.0 * launch.constants["ROWS"] * launch.constants["WIDTH"] * launch.constants["DEPTH"]
        return Loops(outside, inside, flops / tile / launch.programs)
    if inside.bytes:
        warps = launch.programs * kernel.warps
        return Loops(outside, inside, max((size / warps - outside.bytes) / inside.bytes, 1.0))
    if inside.issued:
        return Loops(outside, inside, launch.constants.get("TOPK", 1))
    # Of two branches, of whole and of last blocks, one runs.
    part = min(1.0, size / launch.programs / kernel.warps / once.bytes) if "addresses" in launch.sizes else 1.0
    return Loops(Count(*(int(part * each) for each in once)), inside, 0)


def executed(launch: Launch, kernel: Kernel, found: Loops) -> tuple[float, float]:
    """Instructions, and those on the special function unit, of all warps."""
    warps = launch.programs * kernel.warps
    pairs = ((found.outside.issued, found.inside.issued), (found.outside.special, found.inside.special))
    issued, special = (warps * (outside + found.repeats * inside) for outside, inside in pairs)
    return issued, special


def seconds(launch: Launch, kernel: Kernel, size: int, flops: float) -> float:
    """Predicted time of a launch on an H100: memory, issue, special functions, products and the work of one program
    after the other all take part; the longest counts most.
    """
    found = loops(launch, kernel, size, flops)
    issued, special = executed(launch, kernel, found)
    per_second = launches.MULTIPROCESSORS * CLOCK
    resident = min(kernel.programs * launches.MULTIPROCESSORS, launch.programs)
    if found.inside.tensor:  # loads are ahead by some repeats
        repeat = flops / PRODUCTS * launches.MULTIPROCESSORS / launch.programs / found.repeats
        products = flops / PRODUCTS
    else:
        repeat = found.inside.issued * STALL / CLOCK + (LATENCY if found.inside.bytes else 0.0)
        products = 0.0
    program = LATENCY + found.outside.issued * STALL / CLOCK + found.repeats * repeat
    in_flight = resident * kernel.warps * (kernel.loops.bytes or kernel.once.bytes)
    limits = (
        size / min(BANDWIDTH, in_flight / LATENCY),
        issued / (SLOTS * per_second),
        32 * special / (SPECIAL * per_second),
        products,
        program * launch.programs / resident,
    )
    return LAUNCH + float(sum(each**OVERLAP for each in limits) ** (1 / OVERLAP))


def rounding(launch: Launch, counts: Sequence[int]) -> float:
    """Computed over asked products of a grouped matmul: partial tiles of experts, and the last wave."""
    at, rows = launch.constants, sum(counts)
    if "TRANSPOSED" not in at:  # the gradient of weights: every program has one tile, as deep as its expert's rows
        return float(sum(cdiv(each, at["DEPTH"]) * at["DEPTH"] for each in counts) / rows)
    tiles = sum(cdiv(each, at["ROWS"]) for each in counts) * cdiv(at["N"], at["WIDTH"])
    return float(cdiv(tiles, launch.programs) * launch.programs * at["ROWS"] * at["WIDTH"] / (rows * at["N"]))


def measure(
    operator: str, text: str, dtype: torch.dtype, function: Any = None, arch: int = 90, backward: bool = True
) -> list[dict[str, Any]]:
    """One record per kernel of an operator at a shape."""
    shape = importlib.import_module(f"mindspeed_lite.ops.{operator}.cases").CASES.parse(text)
    work = shape.work(dtype.itemsize)[0]
    found: list[dict[str, Any]] = []
    for launch in launches.record(function or _ours(operator, shape), shape.make, dtype, backward):
        row: dict[str, Any] = {"operator": operator, "shape": text, "arch": arch, "kernel": launch.name}
        if isinstance(launch, launches.Torch):
            if arch == 90:
                found.append({**row, **_torch(launch)})
            continue
        kernel = compile_launch(launch, arch)
        size = traffic(launch, kernel, work.bytes)
        flops = work.flops * (rounding(launch, counts(shape)) if operator == "grouped_matmul" else 1.0)
        time = seconds(launch, kernel, size, flops)
        issued, special = executed(launch, kernel, loops(launch, kernel, size, flops))
        # Elements moved by one thread of each warp.
        elements = size / dtype.itemsize / 32
        found.append({
            **row, "registers": kernel.registers, "spills": kernel.spills, "shared": kernel.shared,
            "programs": kernel.programs, "code": kernel.once.issued,
            "instructions": round(issued / elements, 2), "special": round(special / elements, 2),
            "bytes": size, "microseconds": round(1e6 * time, 1),
        })  # fmt: skip
    return found


def _torch(launch: launches.Torch) -> dict[str, Any]:
    nothing = dict.fromkeys(("registers", "spills", "shared", "programs", "code", "instructions", "special"))
    microseconds = round(1e6 * (LAUNCH + launch.bytes / BANDWIDTH), 1)
    return {**nothing, "bytes": launch.bytes, "microseconds": microseconds}


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


def total(rows: Iterable[dict[str, Any]]) -> float:
    return round(sum(float(row["microseconds"]) for row in rows), 1)


# Measured by the campaign; norms of ours were PyTorch's then.
MEASURED = (
    ("liger", "rms_norm"), ("liger", "layer_norm"), ("liger", "activation"),
    ("mindspeed_lite", "cross_entropy"), ("mindspeed_lite", "activation"), ("mindspeed_lite", "rope"),
    ("mindspeed_lite", "permute"), ("mindspeed_lite", "adamw"), ("mindspeed_lite", "grouped_matmul"),
)  # fmt: skip


def measured() -> list[dict[str, Any]]:
    """Predicted and measured times, forward and backward, of the campaign's cases on an H100."""
    found: list[dict[str, Any]] = []
    for who, operator in MEASURED:
        text, times = _campaign(operator)
        function = liger()[operator] if who == "liger" else None
        rows = [measure(operator, text, torch.bfloat16, function, backward=each) for each in (False, True)]
        forward, both = (1e6 * each[who] for each in (times[0], times[-1]))
        found.append({"who": who, "operator": operator, "shape": text, "forward": [total(rows[0]), forward]})
        if both != forward:
            found[-1]["backward"] = [round(total(rows[1]) - total(rows[0]), 1), both - forward]
    return found


def _units() -> dict[str, Any]:
    campaign = json.loads((PAGE.parent / "gpu" / "h100.json").read_text())
    found: dict[str, Any] = campaign["steps"]["kernels"]["operators"]
    return found


def _campaign(operator: str) -> tuple[str, list[dict[str, float]]]:
    """The shape that was timed on an H100, and seconds of the contenders: forward, and with backward."""
    rows = _units().get(operator, {"rows": []})["rows"]
    times = [{each["name"]: each["seconds"] for each in row["contenders"] if each["seconds"]} for row in rows]
    return (rows[0]["case"].split()[0], times) if rows else ("", [])


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
        found.setdefault(row["kernel_name"], []).append(round(predicted / (1e3 * float(row["y_value_50"])), 3))
    return found


def page(table: dict[str, Any]) -> str:
    error = median_error(table)
    lines = [
        "# Predicted times of CUDA kernels",
        "",
        "**These are predictions, not measurements.** `python -m lab.gpu_static` compiles Triton kernels for sm_90",
        "and sm_100, counts the instructions of their machine code and predicts their time on an H100; the model is",
        "in `lab/gpu_static.py`. PyTorch's own kernels move their inputs and results.",
        "",
        "## Error",
        "",
        f"Median error {100 * error:.0f} %, largest {100 * max(errors(table)):.0f} %. Bandwidth and products per",
        "second are those of a measured copy and product; the other constants are assumed, not fitted.",
        "",
        "| Measured on [one H100](gpu/h100.md) | Shape | Forward, predicted over measured | Backward |",
        "| --- | --- | --- | --- |",
        *(
            f"| {row['operator']}, {_who(row)} | {row['shape']} "
            f"| {_over(row['forward'])} | {_over(row['backward']) if 'backward' in row else '-'} |"
            for row in table["measured"]
        ),
        "",
        "| Forward, published by Liger-Kernel | Predicted over published, by growing size |",
        "| --- | --- |",
        *(f"| {name} | {', '.join(f'{each:.2f}' for each in ratios)} |" for name, ratios in table["published"].items()),
        "",
        "## Operators",
        "",
        "Forward and backward, bf16. Predicted: all kernels. Measured: on that H100, with a star an earlier kernel;",
        "PyTorch's is its fastest, in brackets predicted. Each operator has one backend on CUDA, the fastest. A lead",
        "below the median error decides nothing: ours stays where it serves what others do not. No kernel spills;",
        "registers, shared memory and instructions of each are in `gpu-static.json`.",
        "",
        "| Operator | Shape | Ours, predicted | measured | Liger, predicted | measured | PyTorch | Least | Backend |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for operator, shapes in SHAPES.items():
        for shape in shapes:
            ours, theirs = (_total_of(table[who], operator, shape) for who in ("ours", "liger"))
            found = [_measured(operator, shape, who) for who in ("mindspeed_lite", "liger", "torch")]
            own, by_liger, by_torch = found[0] if ("mindspeed_lite", operator) in MEASURED else None, *found[1:]
            predicted = table["torch"].get(f"{operator} {shape}")
            cells = [*map(_us, (ours, own, theirs, by_liger, by_torch or predicted))]
            cells[1] += "*" if own and _is_older(operator) else ""
            cells[4] = f"({cells[4]})" if predicted else cells[4]
            others = {"Liger's": by_liger or theirs, "PyTorch's": by_torch or predicted}
            fastest = _fastest(own or ours, {name: each for name, each in others.items() if each}, error)
            backend = fastest if fastest != "undecided" and operator not in KEPT else f"ours: {KEPT.get(operator, '?')}"
            lines.append(f"| {operator} | {shape} | {' | '.join(cells)} | {fastest} | {backend} |")
    return "\n".join(lines) + "\n"


def errors(table: dict[str, Any]) -> list[float]:
    pairs = [row[each] for row in table["measured"] for each in ("forward", "backward") if each in row]
    ratios = [each for some in table["published"].values() for each in some]
    return [abs(each - 1) for each in (*ratios, *(predicted / found for predicted, found in pairs))]


def median_error(table: dict[str, Any]) -> float:
    return statistics.median(errors(table))


def _fastest(ours: float | None, others: dict[str, float], error: float) -> str:
    if not ours or not others:
        return "-"
    best = min(others, key=others.__getitem__)
    if abs(ours - others[best]) <= error * min(ours, others[best]):
        return "undecided"
    return "ours" if ours < others[best] else best


def _who(row: dict[str, Any]) -> str:
    return "Liger" if row["who"] == "liger" else "ours*" if _is_older(row["operator"]) else "ours"


def _is_older(operator: str) -> bool:
    """Whether the campaign measured an earlier kernel of ours."""
    return bool(_units()[operator]["stamp"] != stamps.of_operator(operator))


def _over(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.0f} / {pair[1]:.0f} us = {pair[0] / pair[1]:.2f}"


def _total_of(rows: Iterable[dict[str, Any]], operator: str, shape: str) -> float | None:
    found = [row for row in rows if (row["shape"], row["operator"], row["arch"]) == (shape, operator, 90)]
    return total(found) if found else None


def _measured(operator: str, shape: str, who: str) -> float | None:
    """Microseconds of both passes on the campaign's H100, of the fastest contender whose name begins with `who`."""
    text, times = _campaign(operator)
    found = [seconds for name, seconds in (times[-1] if text == shape else {}).items() if name.startswith(who)]
    return 1e6 * min(found, default=0.0) or None


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} us"


def of_torch() -> dict[str, float]:
    """Microseconds of PyTorch's side where the campaign has no time of it."""
    found = {}
    for operator, shapes in SHAPES.items():
        for shape in shapes:
            if _measured(operator, shape, "torch") is None:
                reference = importlib.import_module(f"mindspeed_lite.ops.{operator}.cases").CASES.parse(shape).reference
                found[f"{operator} {shape}"] = total(measure(operator, shape, torch.bfloat16, reference))
    return found


def ours(operators: Iterable[str] = SHAPES) -> list[dict[str, Any]]:
    return [
        row
        for operator in operators
        for shape in SHAPES[operator]
        for arch in (90, 100)
        for row in measure(operator, shape, torch.bfloat16, arch=arch)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--published", type=Path, metavar="CSV", help="Liger's benchmark/data/all_benchmark_data.csv")
    parser.add_argument("--check", nargs="+", choices=SHAPES, metavar="OPERATOR", help="print their kernels as JSON")
    given = parser.parse_args()
    launches.install()
    if given.check:
        print(json.dumps(ours(given.check)))
        return
    path = PAGE.with_suffix(".json")
    table = json.loads(path.read_text()) if path.exists() else {"published": {}, "measured": [], "liger": []}
    table |= {"ours": ours(), "torch": of_torch(), "sources": {name: stamps.of_sources(name) for name in SHAPES}}
    if liger():
        table["liger"] = [
            row
            for operator, function in liger().items()
            for row in measure(operator, SHAPES[operator][0], torch.bfloat16, function)
        ]
        table["measured"] = measured()
        if given.published:
            table["published"] = published_ratios(given.published)
    path.write_text(json.dumps(table, indent=1) + "\n")
    PAGE.write_text(page(table))
    print(f"median error {100 * median_error(table):.0f} %, largest {100 * max(errors(table)):.0f} %")
    print(PAGE)


if __name__ == "__main__":
    main()
