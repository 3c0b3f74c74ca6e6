"""Records as the measurements write them: a full one, broken ones, and one of operators."""

from __future__ import annotations

import random
from typing import Any

SCRIPT = "needs <script>alert('x')</script> & torch | 2.6"
LONG = "use_flash_attn+use_fused_rmsnorm+use_fused_rotary_pos_emb+use_fused_swiglu+reuse_fp32_param"
SHARES = {"linear": 0.46, "attention": 0.2, "moe": 0.0, "communication exposed": 0.04, "other": 0.3}
PAIR = "one pair: no interval"


def run(repeat: int, step: float, memory: float, apart: float = 0.0) -> dict[str, Any]:
    """One good run: two steps of warm-up, then measured ones."""
    noise = random.Random(f"{repeat}{step}")
    steps = [
        {
            "iteration": at,
            "seconds": step * (1.0 + noise.gauss(0, 0.012)),
            "measured": at > 2,
            "loss": {"lm loss": 10.8 * 0.93**at + apart * at},
            "grad_norm": 2.5 * 0.96**at,
            "memory_bytes": int(memory * 0.9),
            "live_bytes": int(memory * 0.8),
        }
        for at in range(1, 9)
    ]
    return {
        "repeat": repeat, "status": "ok", "reason": None, "log": f"logs/run-{repeat}.log", "log_tail": [],
        "seconds": step * 30, "exit_code": 0, "first_step_seconds": 8.1 + step, "median_step_seconds": step,
        "peak_memory_bytes": [int(memory), int(memory * 0.98)], "steps": steps,
    }  # fmt: skip


def failed(repeat: int, status: str, reason: str) -> dict[str, Any]:
    """A run that made no step, with the end of a log that holds markup and control characters."""
    tail = ["Traceback:", "\x1b[31mRuntimeError: </pre><script>alert('log')</script> ``` out | of memory\x1b[0m"]
    nothing = {"first_step_seconds": None, "median_step_seconds": None, "peak_memory_bytes": [], "steps": []}
    return run(repeat, 0.1, 1e9) | {"status": status, "reason": reason, "exit_code": 1, "log_tail": tail} | nothing


def arm(name: str, step: float, memory: float, repeats: int = 3, **changes: Any) -> dict[str, Any]:
    """An arm whose runs went well."""
    role = {"off": "off", "rounding baseline, float32": "rounding_baseline"}.get(name, "on")
    made = {
        "name": name,
        "role": role,
        "features": name.split("+") if role == "on" else [],
        "skipped": {},
        "fallbacks": [],
        "numerics": "ulp" if role == "on" else "bitwise",
        "runs": [run(repeat, step * (1 + repeat / 400), memory) for repeat in range(1, repeats + 1)],
        "summary": {
            "step_seconds": step, "step_seconds_p10": step * 0.985, "step_seconds_p90": step * 1.02,
            "tokens_per_second": 32768 / step, "tokens_per_second_per_process": 16384 / step,
            "flops_per_second": 2e13 / step, "utilisation": 0.084 / step, "peak_memory_bytes": memory,
            "memory_kind": "allocated by torch on the device", "first_step_seconds": 8.1 + step,
        },
        "breakdown": {
            "wall_seconds": step,
            "categories": {category: share * step for category, share in SHARES.items()},
            "communication": {"exposed_seconds": 0.04 * step, "hidden_seconds": 0.06 * step},
            "processes": 2,
        },
    }  # fmt: skip
    return made | changes


def ratio(value: float, width: float | None, verdict: str, pairs: int = 3) -> dict[str, Any]:
    low, high = (None, None) if width is None else (value - width, value + width)
    return {"ratio": value, "low": low, "high": high, "pairs": [value] * pairs, "verdict": verdict}


def comparison(name: str, speed: dict[str, Any], memory: dict[str, Any], apart: float = 2e-5, **loss: Any) -> Any:
    losses = [10.8 * 0.93**at for at in range(1, 9)]
    series = [{"iteration": at, "off": each, "on": each + apart * at} for at, each in enumerate(losses, 1)]
    judged = {
        "class": "ulp", "largest_difference": apart * 8, "rms_difference": apart * 5, "step": 8,
        "grad_norm_difference": 3.1e-4, "series": series, "times_rounding_baseline": apart * 5 / 9e-5,
        "rounding_baseline": {"kind": "itself in float32", "largest_difference": 9e-5, "rms_difference": 9e-5},
        "verdict": "agrees", "reason": "the losses differ within what rounding explains",
    }  # fmt: skip
    steady = {"figure": "live_bytes", "bytes_per_step_off": 0.0, "bytes_per_step_on": 0.0, "verdict": "steady"}
    return {
        "arm": name,
        "against": "off",
        "speed": speed,
        "memory": memory,
        "first_step": ratio(1.01, 0.03, "inside the noise") if speed["low"] else ratio(1.01, None, PAIR, 1),
        "loss": judged | loss,
        "growth": steady,
    }


def finding(severity: str, text: str, name: str | None = None) -> dict[str, Any]:
    return {"severity": severity, "arm": name, "text": text}


def full() -> dict[str, Any]:
    """Three arms and a rounding baseline, three repeats, everything known."""
    identical = {"apart": 0.0, "verdict": "identical", "reason": "every loss and gradient norm has the same bits"}
    skipped = {"use_fused_swiglu": [SCRIPT, "the model has no SwiGLU"]}
    return {
        "schema_version": 1,
        "kind": "bench",
        "created": "2025-06-01T12:00:00+00:00",
        "title": "Features of mindspeed-lite in pretrain_gpt.py",
        "command": ["torchrun", "pretrain_gpt.py", "--name", "a | b `c` <d>"],
        "complete": True,
        "settings": {"repeats": 3, "warmup": 2, "timeout": 1800.0, "mode": "each", "beside": [], "confidence": 0.95},
        "environment": {
            "device": "NVIDIA H100 80GB HBM3", "device_type": "cuda", "world_size": 2, "threads": 8,
            "versions": {"torch": "2.9.1", "megatron-core": "0.16.0"}, "affinity": [[0, 1, 2, 3], [8, 9]],
            "allocator": "expandable_segments:True", "variables": {"OMP_NUM_THREADS": "8"}, "differences": [],
        },
        "model": {"layers": 12, "experts": None, "parallel": {"tensor": 2, "data": 1}, "tokens_per_step": 32768},
        "ceiling": {"flops_per_second": 6.2e14, "bytes_per_second": 2.9e12, "source": "measured: matmul in bfloat16"},
        "arms": [
            arm("off", 0.412, 21.4e9),
            arm("use_flash_attn", 0.338, 15.2e9),
            arm("use_fused_rmsnorm", 0.409, 21.4e9, skipped=skipped),
            arm("rounding baseline, float32", 0.413, 21.4e9),
        ],
        "comparisons": [
            comparison("use_flash_attn", ratio(1.219, 0.02, "faster"), ratio(0.71, 0.002, "smaller")),
            comparison(
                "use_fused_rmsnorm",
                ratio(1.007, 0.013, "inside the noise"), ratio(1.0, 0.001, "inside the noise"), **identical,
            ),
        ],
        "findings": [
            finding("note", "use_fused_swiglu was asked for and not applied.", "use_fused_rmsnorm"),
            finding("warning", "The clock of the device fell by 4 % | during run 2 of `off`."),
        ],
        "files": {"trace": ["traces/off.json"], "plots": ["time.png", "loss.png"]},
    }  # fmt: skip


def broken() -> dict[str, Any]:
    """Incomplete: an arm crashed in every run, another hung in its second and grows."""
    report = full()
    crashed = arm("use_flash_attn", 0.3, 1e9, summary=None, breakdown=None)
    crashed["runs"] = [failed(at, "crashed", "out of memory <b>in</b> step 3") for at in (1, 2, 3)]
    hung = arm("all", 0.331, 15.1e9, repeats=1)
    hung["runs"].append(failed(2, "hung", "no step for 1800 s"))
    grows = comparison("all", ratio(0.95, None, PAIR, 1), ratio(0.7, None, PAIR, 1))
    grows["growth"] |= {"bytes_per_step_on": 2.5e6, "verdict": "grows"}
    nothing = dict.fromkeys(("speed", "memory", "first_step", "loss", "growth"))
    report["environment"]["differences"] = ["OMP_NUM_THREADS: 8 in off, 4 in all"]
    return report | {
        "complete": False,
        "arms": [report["arms"][0], crashed, hung],
        "comparisons": [{"arm": "use_flash_attn", "against": "off", **nothing}, grows],
        "findings": [finding("warning", "this is incomplete"), finding("failure", "it crashed", "use_flash_attn")],
    }  # fmt: skip


def compared(*comparisons: Any) -> dict[str, Any]:
    """A report with these comparisons alone."""
    return full() | {"comparisons": list(comparisons)}


def single() -> dict[str, Any]:
    """One pair: no interval anywhere."""
    return compared(comparison("use_flash_attn", ratio(1.219, None, PAIR, 1), ratio(0.71, None, PAIR, 1)))


def noise() -> dict[str, Any]:
    return compared(full()["comparisons"][1])


def slower() -> dict[str, Any]:
    return compared(comparison("use_flash_attn", ratio(0.8, 0.05, "slower"), ratio(1.3, 0.05, "larger")))


def too_few() -> dict[str, Any]:
    """An interval from 0.01 to 400, which says nothing."""
    speed = {"ratio": 2.13, "low": 0.01, "high": 400.0, "pairs": [0.91, 5.0], "verdict": "too few runs to tell"}
    return compared(comparison("use_flash_attn", speed, ratio(1.0, 0.001, "inside the noise")))


def diverged() -> dict[str, Any]:
    """The loss of an arm stopped being a number."""
    worst = {"largest_difference": "inf", "grad_norm_difference": "inf", "times_rounding_baseline": None, "step": 5}
    found = comparison(
        "use_flash_attn", ratio(1.219, 0.02, "faster"), ratio(0.71, 0.002, "smaller"), **worst, verdict="differs",
        reason="a loss is missing or not a number in one of the two, first at iteration 5",
    )  # fmt: skip
    for point in found["loss"]["series"][4:]:
        point["on"] = "nan"
    return compared(found)


def crowd() -> dict[str, Any]:
    """Eight arms, one of them with a very long name."""
    report = full()
    names = [*(f"use_feature_number_{at}" for at in range(1, 7)), LONG]
    report["arms"] = [report["arms"][0], *(arm(name, 0.4 - at / 100, 2e10) for at, name in enumerate(names))]
    report["comparisons"] = [
        comparison(name, ratio(1.0 + at / 30, 0.02, "faster"), ratio(1 - at / 20, 0.01, "smaller"))
        for at, name in enumerate(names, 1)
    ]
    return report


def contender(name: str, time: float | None, error: str | None = None) -> dict[str, Any]:
    figures: dict[str, Any] = dict.fromkeys(("low", "high", "bytes_per_second", "flops_per_second", "of_ceiling"))
    figures |= dict.fromkeys(("ratio", "ratio_low", "ratio_high"))
    if time is not None:
        share = 1.1e-4 / time
        figures |= {"low": time * 0.97, "high": time * 1.06, "of_ceiling": 0.87 * share}
        figures |= {"bytes_per_second": 2.6e12 * share, "flops_per_second": 8e12 * share}
        if name != "mindspeed_lite":
            figures |= {"ratio": 1 / share, "ratio_low": 0.96 / share, "ratio_high": 1.05 / share}
    return {"name": name, "seconds": time, "error": error, **figures}


def operators() -> dict[str, Any]:
    """Two operators, contenders that did not run or differ, and an earlier report to compare with."""
    same = {"seconds": 1.12e-4, "ratio": 1.01, "verdict": "same"}
    regression = {"seconds": 0.8e-4, "ratio": 1.36, "verdict": "regression"}
    cases = (
        ("rms_norm", "4096x1024 bf16", "forward", same, "ImportError: <b>liger</b> | not installed"),
        ("rms_norm", "4096x1024 bf16", "forward+backward", regression, "does not agree with ours: output differs by 1"),
        ("attention", "causal | no <mask>", "forward", None, None),
    )
    rows = [
        {
            "operator": operator, "case": case, "direction": direction, "device": "cuda", "dtype": "bfloat16",
            "bytes": 16_777_216, "flops": 33_554_432, "bound": "compute" if operator == "attention" else "memory",
            "contenders": [
                contender("mindspeed_lite", 1.1e-4), contender("torch", 3.2e-4), contender("torch.compile", 1.08e-4),
                contender("liger", None if error else 1.4e-4, error),
            ],
            "earlier": earlier,
        }
        for operator, case, direction, earlier, error in cases
    ]  # fmt: skip
    report = full()
    kept = ("schema_version", "created", "complete", "environment", "ceiling")
    findings = [finding("note", "liger did not run"), finding("failure", "Regression in rms_norm")]
    made = {"kind": "bench-ops", "title": "Operators", "command": [], "settings": {"repeats": 50, "confidence": 0.95}}
    return {key: report[key] for key in kept} | made | {"findings": findings, "rows": rows}


EVERY = {
    made.__name__: made
    for made in (full, broken, single, noise, slower, too_few, diverged, crowd, operators)
}  # fmt: skip
