"""Reports as the measurements write them: a full one, broken ones, and one of operators."""

from __future__ import annotations

import random
from typing import Any

SCRIPT = "needs <script>alert('x')</script> & torch | 2.6"
LONG = "use_flash_attn+use_fused_rmsnorm+use_fused_rotary_pos_emb+use_fused_swiglu+reuse_fp32_param"
CATEGORIES = {
    "linear": 0.46,
    "attention": 0.19,
    "norm": 0.05,
    "activation": 0.06,
    "rotary": 0.02,
    "embedding": 0.01,
    "moe": 0.0,
    "loss": 0.04,
    "optimizer": 0.07,
    "gradient accumulation and reduction": 0.03,
    "communication exposed": 0.04,
    "copies": 0.01,
    "other": 0.02,
}


def run(repeat: int, step: float, memory: float, apart: float = 0.0, steps: int = 14) -> dict[str, Any]:
    """One good run: two steps of warm-up, then measured ones."""
    noise = random.Random(f"{repeat}{step}")
    made = [
        {
            "iteration": at,
            "seconds": step * (6.0 if at == 1 else 1.0 + noise.gauss(0, 0.012)),
            "measured": at > 2,
            "loss": {"lm loss": 10.8 * 0.93**at + apart * (at % 3) / 2},
            "grad_norm": 2.5 * 0.96**at,
            "memory_bytes": int(memory * 0.9),
            "live_bytes": int(memory * 0.8),
        }
        for at in range(1, steps + 1)
    ]
    return {
        "repeat": repeat,
        "status": "ok",
        "reason": None,
        "log": f"logs/run-{repeat}.log",
        "log_tail": [],
        "seconds": step * (steps + 20),
        "exit_code": 0,
        "first_step_seconds": 8.1 + step,
        "peak_memory_bytes": [int(memory), int(memory * 0.98 + repeat * 2e6)],
        "median_step_seconds": step,
        "steps": made,
    }


def failed(repeat: int, status: str, reason: str, code: int | None) -> dict[str, Any]:
    """A run that made no measured step."""
    tail = [
        "Traceback (most recent call last):",
        '  File "pretrain_gpt.py", line 12, in <module>',
        "\x1b[31mRuntimeError: </pre><script>alert('log')</script> ``` out | of memory\x1b[0m",
    ]
    return run(repeat, 0.1, 1e9, steps=1) | {
        "status": status,
        "reason": reason,
        "exit_code": code,
        "log_tail": tail,
        "median_step_seconds": None,
        "first_step_seconds": None,
        "peak_memory_bytes": [],
        "steps": [],
    }


def arm(name: str, step: float, memory: float, repeats: int = 3, apart: float = 0.0, **changes: Any) -> dict[str, Any]:
    """An arm whose runs went well."""
    role = name if name in ("off", "rounding_baseline") else "on"
    shares = {key: share * step for key, share in CATEGORIES.items()}
    shares["other"] += 0.0
    made = {
        "name": name,
        "role": role,
        "features": [] if role != "on" else name.split("+"),
        "skipped": {},
        "numerics": "bitwise" if role != "on" else "ulp",
        "runs": [run(repeat, step * (1 + repeat / 400), memory, apart) for repeat in range(1, repeats + 1)],
        "summary": {
            "step_seconds": step,
            "step_seconds_p10": step * 0.985,
            "step_seconds_p90": step * 1.02,
            "tokens_per_second": 32768 / step,
            "tokens_per_second_per_process": 16384 / step,
            "flops_per_second": 4.1e13 / step / 2,
            "utilisation": 0.21 / step * 0.4,
            "peak_memory_bytes": memory,
            "memory_kind": "allocated by torch on the device",
            "first_step_seconds": 8.1 + step,
        },
        "breakdown": {
            "wall_seconds": sum(shares.values()),
            "categories": shares,
            "communication": {
                "total_seconds": step * 0.1,
                "exposed_seconds": step * 0.04,
                "hidden_seconds": step * 0.06,
            },
            "processes": 2,
        },
    }
    return made | changes


def measure(ratio: float, width: float | None, verdict: str, pairs: int = 3) -> dict[str, Any]:
    limits = (None, None) if width is None else (ratio - width, ratio + width)
    return {"ratio": ratio, "low": limits[0], "high": limits[1], "pairs": [ratio] * pairs, "verdict": verdict}


def comparison(name: str, speed: dict[str, Any], memory: dict[str, Any], **loss: Any) -> dict[str, Any]:
    apart = loss.pop("apart", 2e-5)
    series = [
        {"iteration": at, "off": 10.8 * 0.93**at, "on": 10.8 * 0.93**at + apart * (at % 3) * 1.1**at / 2}
        for at in range(1, 15)
    ]
    return {
        "arm": name,
        "against": "off",
        "speed": speed,
        "memory": memory,
        "first_step": measure(1.01, 0.03, "inside the noise")
        if speed["low"]
        else measure(1.01, None, speed["verdict"], 1),
        "loss": {
            "class": "ulp",
            "largest_difference": apart * 3.4,
            "step": 14,
            "grad_norm_difference": 3.1e-4,
            "series": series,
            "rounding_baseline": {"kind": "summation order", "largest_difference": 9e-5},
            "times_rounding_baseline": apart * 3.4 / 9e-5,
            "verdict": "agrees",
            "reason": "The difference stays below that of the rounding baseline.",
        }
        | loss,
        "growth": {"figure": "live_bytes", "bytes_per_step_off": 0.0, "bytes_per_step_on": 0.0, "verdict": "steady"},
    }


def environment() -> dict[str, Any]:
    return {
        "device": "NVIDIA H100 80GB HBM3",
        "device_type": "cuda",
        "versions": {"python": "3.12.8", "torch": "2.9.1", "megatron-core": "0.16.0", "mindspeed-lite": "0.4.0"},
        "world_size": 2,
        "threads": 8,
        "affinity": [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]],
        "allocator": "expandable_segments:True",
        "variables": {"OMP_NUM_THREADS": "8", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        "differences": [],
    }


def full() -> dict[str, Any]:
    """Four arms and a rounding baseline, three repeats, everything known."""
    return {
        "schema_version": 1,
        "kind": "bench",
        "created": "2025-06-01T12:00:00+00:00",
        "title": "Features of mindspeed-lite in pretrain_gpt.py",
        "command": [
            "torchrun",
            "--nproc-per-node",
            "2",
            "pretrain_gpt.py",
            "--name",
            "a | b `c` <d>",
            "--use-flash-attn",
        ],
        "complete": True,
        "settings": {
            "repeats": 3,
            "warmup": 2,
            "steps": 12,
            "timeout": 1800,
            "mode": "each",
            "rounding_baseline": True,
            "confidence": 0.95,
        },
        "environment": environment(),
        "model": {
            "layers": 12,
            "hidden": 1024,
            "ffn": 4096,
            "heads": 16,
            "sequence": 2048,
            "vocabulary": 50304,
            "experts": None,
            "micro_batch": 4,
            "global_batch": 16,
            "dtype": "bfloat16",
            "parallel": {"tensor": 2, "pipeline": 1, "data": 1},
            "tokens_per_step": 32768,
            "flops_per_step": 4.1e13,
        },
        "ceiling": {"flops_per_second": 6.2e14, "bytes_per_second": 2.9e12, "source": "measured: matmul in bfloat16"},
        "arms": [
            arm("off", 0.412, 21.4e9),
            arm("use_flash_attn", 0.338, 15.2e9, apart=2e-5),
            arm("use_fused_rmsnorm", 0.409, 21.4e9, skipped={"use_fused_swiglu": [SCRIPT, "the model has no SwiGLU"]}),
            arm("all", 0.331, 15.1e9, apart=2e-5),
            arm("rounding_baseline", 0.413, 21.4e9, apart=9e-5),
        ],
        "comparisons": [
            comparison("use_flash_attn", measure(1.219, 0.02, "faster"), measure(0.71, 0.002, "smaller")),
            comparison(
                "use_fused_rmsnorm",
                measure(1.007, 0.013, "inside the noise"),
                measure(1.0, 0.001, "inside the noise"),
                apart=0.0,
                verdict="identical",
                reason="Every loss is the same to the last bit.",
            ),
            comparison("all", measure(1.245, 0.021, "faster"), measure(0.706, 0.002, "smaller"), apart=2.4e-5),
        ],
        "findings": [
            {"severity": "note", "arm": "all", "text": "use_fused_swiglu was asked for and not applied."},
            {
                "severity": "warning",
                "arm": None,
                "text": "The clock of the device fell by 4 % | during run 2 of `off`.",
            },
        ],
        "files": {
            "trace": ["traces/off.json", "traces/all.json"],
            "plots": ["step-time.png", "loss.png", "memory.png"],
        },
    }


def broken() -> dict[str, Any]:
    """Incomplete: an arm crashed in every run, another hung in its second."""
    report = full() | {"complete": False, "findings": []}
    crashed = arm("use_flash_attn", 0.3, 1e9, summary=None, breakdown=None)
    crashed["runs"] = [failed(at, "crashed", "out of memory <b>in</b> step 3", 1) for at in (1, 2, 3)]
    hung = arm("all", 0.331, 15.1e9, repeats=1)
    hung["runs"].append(failed(2, "hung", "no step for 1800 s", None))
    report["arms"] = [report["arms"][0], crashed, hung]
    grows = comparison(
        "all", measure(0.95, None, "one pair: no interval", 1), measure(0.7, None, "one pair: no interval", 1)
    )
    grows["growth"] = {
        "figure": "live_bytes",
        "bytes_per_step_off": 0.0,
        "bytes_per_step_on": 2.5e6,
        "verdict": "grows",
    }
    report["comparisons"] = [grows]
    report["environment"]["differences"] = ["OMP_NUM_THREADS: 8 in off, 4 in all"]
    return report


def single() -> dict[str, Any]:
    """One repeat: no interval anywhere."""
    report = full()
    report["settings"]["repeats"] = 1
    pair = "one pair: no interval"
    report["arms"] = [arm("off", 0.412, 21.4e9, repeats=1), arm("use_flash_attn", 0.338, 15.2e9, repeats=1)]
    report["comparisons"] = [comparison("use_flash_attn", measure(1.219, None, pair, 1), measure(0.71, None, pair, 1))]
    return report


def diverged() -> dict[str, Any]:
    """The loss of an arm stopped being a number."""
    report = full()
    series = [
        {"iteration": at, "off": 10.8 * 0.93**at, "on": 10.8 * 0.93**at if at < 8 else "nan"} for at in range(1, 15)
    ]
    loss = {
        "verdict": "differs",
        "largest_difference": "nan",
        "step": 8,
        "series": series,
        "grad_norm_difference": "inf",
    }
    loss |= {"times_rounding_baseline": "nan", "reason": "From iteration 8 on the loss is no number."}
    report["comparisons"] = [
        comparison("use_flash_attn", measure(1.219, 0.02, "faster"), measure(0.71, 0.002, "smaller"), **loss)
    ]
    for step in report["arms"][1]["runs"][0]["steps"][7:]:
        step["loss"], step["grad_norm"] = {"lm loss": "nan"}, "nan"
    return report


def crowd() -> dict[str, Any]:
    """Eight arms, one of them with a very long name."""
    report = full()
    names = [*(f"use_feature_number_{at}" for at in range(1, 7)), LONG]
    report["arms"] = [report["arms"][0], *(arm(name, 0.4 - at / 100, 2e10 - at * 1e9) for at, name in enumerate(names))]
    report["comparisons"] = [
        comparison(name, measure(1.0 + at / 30, 0.02, "faster"), measure(1 - at / 20, 0.01, "smaller"), apart=at * 1e-5)
        for at, name in enumerate(names, 1)
    ]
    return report


def contender(name: str, time: float, **changes: Any) -> dict[str, Any]:
    ours = 1.1e-4
    return {
        "name": name,
        "seconds": time,
        "low": time * 0.97,
        "high": time * 1.06,
        "bytes_per_second": 2.6e12 * ours / time,
        "flops_per_second": 8e12 * ours / time,
        "of_ceiling": 0.87 * ours / time,
        "ratio": time / ours,
        "ratio_low": time / ours * 0.96,
        "ratio_high": time / ours * 1.05,
        "error": None,
    } | changes


def operators() -> dict[str, Any]:
    """Two operators, a contender that did not run, and an earlier report to compare with."""
    empty = dict.fromkeys(
        (
            "seconds",
            "low",
            "high",
            "bytes_per_second",
            "flops_per_second",
            "of_ceiling",
            "ratio",
            "ratio_low",
            "ratio_high",
        )
    )
    same = {"seconds": 1.12e-4, "ratio": 1.01, "verdict": "same"}
    slower = {"seconds": 0.8e-4, "ratio": 0.74, "verdict": "regression"}
    rows = []
    for operator, case, direction, earlier in (
        ("rms_norm", "[4096, 1024] bfloat16, eps 1e-5", "forward", same),
        ("rms_norm", "[4096, 1024] bfloat16, eps 1e-5", "forward+backward", slower),
        ("attention", "[2, 16, 2048, 64] bfloat16 causal | no <mask>", "forward", None),
    ):
        rows.append(
            {
                "operator": operator,
                "case": case,
                "direction": direction,
                "device": "NVIDIA H100 80GB HBM3",
                "dtype": "bfloat16",
                "bytes": 16_777_216,
                "flops": 33_554_432,
                "bound": "compute" if operator == "attention" else "memory",
                "contenders": [
                    contender("mindspeed_lite", 1.1e-4, ratio=1.0, ratio_low=None, ratio_high=None),
                    contender("torch", 3.2e-4),
                    contender("torch.compile", 1.08e-4),
                    contender("liger_kernel", 1.0, **empty, error="ImportError: <b>liger</b> | not installed")
                    if direction == "forward"
                    else contender("liger_kernel", 1.4e-4),
                ],
                "earlier": earlier,
            }
        )
    report = full()
    kept = ("schema_version", "created", "complete", "environment", "ceiling")
    settings = {"repeats": 50, "confidence": 0.95}
    made = {key: report[key] for key in kept}
    return made | {"kind": "bench-ops", "title": "Operators", "settings": settings, "findings": [], "rows": rows}


EVERY = {
    "full": full,
    "broken": broken,
    "single": single,
    "diverged": diverged,
    "crowd": crowd,
    "operators": operators,
}
