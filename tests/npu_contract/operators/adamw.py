"""`mindspeed_lite.ops.adamw` on torch's `_fused_adamw_`, whose kernel torch_npu brings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mindspeed_lite.ops.adamw import adamw, moments
from tests.npu_contract.definitions import DTYPES, Call, Make, OperatorCall, is_tensor

LISTS = ("self", "grads", "exp_avgs", "exp_avg_sqs", "state_steps")
RULE: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1, "step": 3}


def _step(grad: str = "float32", state: str = "float32", halves: bool = False, **options: Any) -> OperatorCall:
    """Of two parameters and one that is empty; returns all that is written."""

    def call(make: Make) -> Any:
        def tensors(dtype: str) -> list[torch.Tensor]:
            return [make(*shape, dtype=dtype, grad=False) for shape in ((6, 4), (64,), (0,))]

        params, grads = tensors("bfloat16" if halves else "float32"), tensors(grad)
        low = [torch.zeros_like(each, dtype=torch.int16 if halves else torch.bfloat16) for each in params]
        more: dict[str, Any] = {"lows" if halves else "outs": low}
        if state == "uint8":
            exp_avgs, exp_avg_sqs = ([torch.zeros_like(each, dtype=torch.uint8) for each in params] for _ in range(2))
            sizes = [(each.numel(), each.device) for each in params]
            more["blocks"] = [(moments.exponents(*size), moments.exponents(*size)) for size in sizes]
        else:
            exp_avgs, exp_avg_sqs = tensors(state), [each.abs() for each in tensors(state)]
        adamw(params, grads, exp_avgs, exp_avg_sqs, **RULE, **options, **more)
        return params, low, exp_avgs, exp_avg_sqs

    return call


CALLS = {
    "scaled": _step(grad_scale=0.25),
    "narrow gradients": _step("bfloat16"),
    "halves": _step("bfloat16", halves=True, grad_scale=0.25),
    "narrow moments": _step(state="bfloat16"),
    "halves and moments in bytes": _step("bfloat16", "uint8", halves=True),
}


# ---- what is documented ----


def fused_adamw(call: Call) -> Iterator[str]:
    """_fused_adamw_(self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, *, ...), lists of one length

    torch_npu's kernel reads neither grad_scale nor found_inf, and reads the count of steps on the device.
    """
    a = call.arguments
    if len({len(a[name]) for name in LISTS}) != 1:
        yield f"lists of {[len(a[name]) for name in LISTS]} tensors: want one length"
        return
    for place, var in enumerate(a["self"]):
        if var.dtype not in DTYPES:
            yield f"a parameter is {var.dtype}: want one of {', '.join(DTYPES)}"
        for name in LISTS[1:4]:
            yield from is_tensor(name, a[name][place], var.dtype, var.shape)
        step = a["state_steps"][place]
        if step.shape not in ((), (1,)) or step.dtype not in ("float32", "int64") or step.device != var.device:
            yield f"state_steps has {step} on {step.device}: want one number on {var.device}"
    for name in ("grad_scale", "found_inf"):
        if a[name] is not None:
            yield f"{name} is given: it is not read"
    if a["amsgrad"] and not a["max_exp_avg_sqs"]:
        yield "amsgrad wants max_exp_avg_sqs"
    for name in ("beta1", "beta2"):
        if not 0.0 <= a[name] < 1.0:
            yield f"{name} is {a[name]}"


CONTRACTS = {"_fused_adamw_": fused_adamw}
