"""What jobs of `core_loop` are trained with: parallel layouts, features, and how far losses may drift."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.harness.training import Result

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "tp2": (2, {"tp": 2}),
    "tp2_sp": (2, {"tp": 2, "sp": True}),
    "pp2": (2, {"pp": 2}),
    "pp2_vpp2": (2, {"pp": 2, "vpp": 2, "layers": 4}),
    "dp2_distributed_optimizer": (2, {"distributed_optimizer": True}),
    "ep2": (2, {"ep": 2, "experts": 4}),
}

FEATURES = {
    "use_flash_attn": True,
    "use_fused_adamw": True,
    "use_fused_cross_entropy": True,
    "use_fused_embedding": True,
    "use_fused_rmsnorm": True,
    "use_fused_rotary_pos_emb": True,
    "use_fused_swiglu": True,
    "use_gradient_accumulation_fusion": True,
    "strict": True,
}

# What a user of Megatron-core sets in the model's configuration himself.
CONFIGURED = {"wgrad_fusion": True}
# bf16 keeps 8 bits, so one rounding moves an activation by up to 2^-9 of itself. The losses of two runs that round
# differently drift apart step by step; 2^-8 of the loss holds with room over the steps here, and a wrong mask,
# scale or missing gradient is off by far more.
DRIFT = 2.0**-8


# Gradient norms of such runs: before the first update, of the same weights, and later. AdamW divides by the size of
# gradients, so losses do not show a gradient of a wrong size.
FIRST_NORM, NORM_DRIFT = 2.0**-10, 2.0**-5


def losses(result: Result, rank: int = -1) -> list[float]:
    return [float.fromhex(loss) for loss, _ in _steps(result.history(rank))]


def _steps(history: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(a, b) for a, b in history if a not in ("gradients", "evaluation")]


def fault(
    off: Sequence[tuple[str, str]],
    on: Sequence[tuple[str, str]],
    drift: float = DRIFT,
    first_norm: float = FIRST_NORM,
) -> str:
    """What is not near in two histories of losses and gradient norms, as hexadecimal floats; "" if all is."""
    off, on = _steps(off), _steps(on)
    if not on or len(on) != len(off):
        return f"{len(on)} steps with it, {len(off)} without"
    for step, pair in enumerate(zip(off, on, strict=True)):
        (loss, norm), (other_loss, other_norm) = ([float.fromhex(each) for each in one] for one in pair)
        for what, a, b, bound in (
            ("loss", loss, other_loss, drift),
            ("gradient norm", norm, other_norm, NORM_DRIFT * drift / DRIFT if step else first_norm),
        ):
            if not abs(a - b) <= bound * abs(a):
                return f"step {step}: {what} {a} off, {b} on: {abs(a - b) / abs(a):.2g}, and {bound:.2g} is allowed"
    return ""


GROUPED = {"moe_grouped_gemm": True, "strict": True}
MOE = {**GROUPED, "moe_permute_fusion": True, "moe_router_fusion": True}
# What a user of Megatron-core sets in the model's configuration himself.
MOE_CONFIGURED = {"moe_permute_fusion": True, "moe_router_fusion": True, "moe_router_dtype": "fp32"}
MORE: dict[str, tuple[int, dict[str, Any]]] = {
    **LAYOUTS,
    "tied": (2, {"pp": 2, "tied": True}),
    "overlapped": (2, {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}),
    "overlapped experts": (2, {**LAYOUTS["ep2"][1], "distributed_optimizer": True, "overlap_grad_reduce": True}),
}
