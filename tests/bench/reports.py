"""Records of made-up runs: a full one, broken ones, and one of operators."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from mindspeed_lite.bench import compose
from mindspeed_lite.bench.breakdown import CATEGORIES
from mindspeed_lite.bench.harness import Arm, Outcome, Process

SCRIPT = "needs <script>alert('x')</script> & torch | 2.6"
LONG = "use_flash_attn+use_fused_rmsnorm+use_fused_rotary_pos_emb+use_fused_swiglu+reuse_fp32_param"
SHARES = {"linear": 0.46, "attention": 0.2, "communication exposed": 0.04, "other": 0.3}
TAIL = ["Traceback:", "\x1b[31mRuntimeError: </pre><script>alert('log')</script> ``` out | of memory\x1b[0m"]
ENVIRONMENT = {
    "device": "NVIDIA H100 80GB HBM3", "device_type": "cuda", "world_size": 2, "threads": 8,
    "versions": {"torch": "2.9.1", "megatron-core": "0.16.0"}, "affinity": "0-3",
    "allocator": "expandable_segments:True", "variables": {"OMP_NUM_THREADS": "8"},
}  # fmt: skip
MODEL = {
    "layers": 12, "experts": None, "parallel": {"tensor": 2, "data": 1}, "tokens_per_step": 32768,
    "flops_per_step": 4e13, "dtype": "bf16",
}  # fmt: skip
CEILING = {"flops_per_second": 6.2e14, "bytes_per_second": 2.9e12, "source": "measured: matmul in bfloat16"}


def outcome(
    name: str, repeat: int, step: float, memory: float, apart: float = 0.0, broken: int = 99, skipped: bool = False,
) -> Outcome:  # fmt: skip
    """A good run of two steps of warm-up and six more; the loss is no number from step `broken` on."""
    noise = random.Random(f"{repeat}{step}")
    steps = [
        {
            "iteration": at,
            "seconds": step * (1.0 + noise.gauss(0, 0.012)),
            "measured": at > 2,
            "loss": {"lm loss": math.nan if at >= broken else 10.8 * 0.93**at + apart * at},
            "grad_norm": 2.5 * 0.96**at,
            "peak_memory_bytes": int(memory * (1 + repeat / 1000)),
            "time": 8.1 + step + repeat / 10,
        }
        for at in range(1, 9)
    ]
    features = [] if name.startswith(("off", "rounding")) else name.split("+")
    entries = [
        {"feature": each, "status": "applied", "flags": ["--x"], "numerics": "ulp", "reasons": []} for each in features
    ]
    if skipped:
        reasons = [SCRIPT, "the model has no SwiGLU"]
        entries.append({"feature": "use_fused_swiglu", "status": "skipped", "flags": [], "reasons": reasons})
    described = {
        "environment": ENVIRONMENT, "model": MODEL, "memory_kind": "allocated by torch", "report": {"entries": entries},
    }  # fmt: skip
    breakdown = {
        "wall_seconds": step,
        "categories": {category: SHARES.get(category, 0.0) * step for category in CATEGORIES},
        "communication": {"exposed_seconds": 0.04 * step, "hidden_seconds": 0.06 * step},
    }
    arithmetic: Any = "float32" if name.startswith("rounding") else "as given"
    process = Process(0, described, steps, breakdown, {"fallbacks": []})
    arm = Arm(name, "only", tuple(features), arithmetic)
    return Outcome(arm, repeat, f"runs/{repeat}-{name[:20]}/log.txt", 0.0, processes=[process])


def failed(name: str, repeat: int, status: str, reason: str) -> Outcome:
    """A run that made no step; its log holds markup and control characters."""
    return Outcome(Arm(name, "all"), repeat, f"logs/run-{repeat}.log", 0.0, status, reason, exit_code=1, log_tail=TAIL)


def runs(name: str, step: float, memory: float, repeats: int = 3, **given: Any) -> list[Outcome]:
    return [outcome(name, each, step * (1 + each / 400), memory, **given) for each in range(1, repeats + 1)]


def record(*outcomes: list[Outcome], complete: bool = True) -> dict[str, Any]:
    return compose.report(
        [each for some in outcomes for each in some], complete, CEILING, created="2025-06-01T12:00:00+00:00",
        title="Features of mindspeed-lite in pretrain_gpt.py", settings={"repeats": 3, "mode": "each", "beside": []},
        command=["torchrun", "pretrain_gpt.py", "--name", "a | b `c` <d>"],
    )  # fmt: skip


def off(repeats: int = 3) -> list[Outcome]:
    return runs("off", 0.412, 21.4e9, repeats)


def flash(step: float, repeats: int = 3, **given: Any) -> list[Outcome]:
    return runs("use_flash_attn", step, 15.2e9, repeats, apart=2e-5, **given)


BASELINE = [outcome("rounding baseline, float32", 1, 0.413, 21.4e9, apart=9e-5)]


def full() -> dict[str, Any]:
    return record(off(), flash(0.338), runs("use_fused_rmsnorm", 0.409, 21.4e9, skipped=True), BASELINE)


def broken() -> dict[str, Any]:
    """Incomplete: an arm crashed in every run, another hung in its second."""
    crashed = [failed("use_flash_attn", at, "crashed", "out of memory <b>in</b> step 3") for at in (1, 2, 3)]
    hung = [outcome("all", 1, 0.431, 15.1e9, apart=2e-5), failed("all", 2, "hung", "no step for 1800 s")]
    return record(off(), crashed, hung, complete=False)


def too_few() -> dict[str, Any]:
    """An interval that holds everything says nothing."""
    return record(off(2), [*flash(0.45, 1), outcome("use_flash_attn", 2, 0.08, 15.2e9)], BASELINE)


def crowd() -> dict[str, Any]:
    """Eight arms, one of them with a very long name."""
    names = [*(f"use_feature_number_{at}" for at in range(1, 7)), LONG]
    return record(off(), *(runs(name, 0.4 - at / 100, 2e10) for at, name in enumerate(names)))


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
    """Two operators, and contenders that did not run or differ."""
    cases = (
        ("rms_norm", "4096x1024 bf16", "forward", "ImportError: <b>liger</b> | not installed"),
        ("rms_norm", "4096x1024 bf16", "forward+backward", "does not agree with ours: output differs by 1"),
        ("attention", "causal | no <mask>", "forward", None),
    )
    rows = [
        {
            "operator": operator, "case": case, "direction": direction, "device": "cuda", "dtype": "bfloat16",
            "bytes": 16_777_216, "flops": 33_554_432, "bound": "compute" if operator == "attention" else "memory",
            "contenders": [
                contender("mindspeed_lite", 1.1e-4), contender("torch", 3.2e-4), contender("torch.compile", 1.08e-4),
                contender("liger", None if error else 1.4e-4, error),
            ],
        }
        for operator, case, direction, error in cases
    ]  # fmt: skip
    report = full()
    kept = ("schema_version", "created", "complete", "environment", "ceiling")
    findings = [
        {"severity": severity, "arm": None, "text": text}
        for severity, text in (("warning", "slower than torch in rms_norm"), ("note", "liger did not run"))
    ]
    made = {"kind": "bench-ops", "title": "Operators", "command": [], "settings": {"quick": False}}
    return {key: report[key] for key in kept} | made | {"findings": findings, "rows": rows}


EVERY: dict[str, Callable[[], dict[str, Any]]] = {
    "full": full,
    "broken": broken,
    "single": lambda: record(off(1), flash(0.338, 1), BASELINE),
    "noise": lambda: record(off(), runs("use_fused_rmsnorm", 0.409, 21.4e9)),
    "slower": lambda: record(off(), flash(0.5), BASELINE),
    "too_few": too_few,
    "diverged": lambda: record(off(), flash(0.338, broken=5), BASELINE),
    "crowd": crowd,
    "operators": operators,
}
