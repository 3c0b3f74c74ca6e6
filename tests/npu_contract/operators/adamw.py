"""`mindspeed_lite.ops.adamw` on torch's `_fused_adamw_`, whose kernel torch_npu brings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tests.npu_contract.definitions import DTYPES, ContractCase, Mutation, Tensors, is_tensor
from tests.npu_contract.recorder import Call, Tensor

BETAS, LR, DECAY, EPS = (0.9, 0.95), 0.01, 0.1, 1e-6
LISTS = ("self", "grads", "exp_avgs", "exp_avg_sqs", "state_steps")


@dataclass(frozen=True)
class AdamW(ContractCase):
    """`mindspeed_lite.ops.adamw.adamw` over `count` tensors and one that is empty."""

    name: str
    count: int = 1
    grad_dtype: str = "float32"
    scale: float | None = None
    out: bool = False
    halves: bool = False
    moments: str = "float32"
    shape: tuple[int, ...] = (6, 4)

    operator = "adamw"
    forward = "_fused_adamw_"

    @property
    def calls(self) -> int:  # type: ignore[override]
        return self.count

    def leaves(self, device: str) -> Tensors:
        shapes = [self.shape] * self.count + [(0,)]
        dtypes = {"param": "float32", "grad": self.grad_dtype, "m": self.moments, "v": self.moments, "last": "bfloat16"}
        if self.halves:
            dtypes |= {"param": "bfloat16", "last": "int16"}
        return {
            f"{name}{place}": torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
            for place, shape in enumerate(shapes)
            for name, dtype in dtypes.items()
        }

    def run(self, leaves: Tensors) -> None:
        from mindspeed_lite.ops.adamw import adamw

        *lists, last = self._lists(leaves)
        rule: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "step": 3}
        adamw(*lists, **rule, grad_scale=self.scale, **self._given(last))

    def arguments(self) -> Mapping[str, Any]:
        # Other forms become flat fp32 tensors for the length of a step.
        flat = self.halves or self.moments != "float32"
        tensor = Tensor("float32", (math.prod(self.shape),) if flat else self.shape, "")
        lists = {name: [tensor] for name in LISTS[:4]} | {"state_steps": [Tensor("float32", (), "")]}
        return {
            **lists,
            "max_exp_avg_sqs": [],
            "lr": LR,
            "beta1": BETAS[0],
            "beta2": BETAS[1],
            "weight_decay": DECAY,
            "eps": EPS,
            "amsgrad": False,
            "maximize": False,
            "grad_scale": None,
            "found_inf": None,
        }

    def result(self) -> None:
        return None

    def _lists(self, leaves: Tensors) -> list[list[torch.Tensor]]:
        places = range(self.count + 1)
        return [[leaves[f"{name}{place}"] for place in places] for name in ("param", "grad", "m", "v", "last")]

    def _given(self, last: list[torch.Tensor]) -> dict[str, Any]:
        from mindspeed_lite.ops.adamw import moments

        given: dict[str, Any] = {"lows": last} if self.halves else {"outs": last if self.out else None}
        if self.moments == "uint8":
            sizes = [(each.numel(), each.device) for each in last]
            given["blocks"] = [(moments.exponents(*size), moments.exponents(*size)) for size in sizes]
        return given


CASES = (
    AdamW("one"),
    AdamW("three", count=3),
    AdamW("scaled", scale=0.25),
    AdamW("narrow gradients", grad_dtype="bfloat16"),
    AdamW("copies", out=True),
    AdamW("one dimension", shape=(64,)),
    AdamW("halves", halves=True, scale=0.25, grad_dtype="bfloat16"),
    AdamW("narrow moments", moments="bfloat16", out=True),
    AdamW("halves and moments in bytes", halves=True, moments="uint8", grad_dtype="bfloat16"),
)


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

MUTATIONS = {
    "scale for torch_npu to apply": Mutation(
        "            amsgrad=False,", "            grad_scale=count,\n            amsgrad=False,", "it is not read"
    ),
    "count on the host": Mutation("device=lists.params[0].device", 'device="cpu"', "cpu"),
    "count as a list": Mutation("torch.full(()", "torch.full((2,)", "want one number"),
    "decay left out": Mutation("weight_decay=rule.weight_decay", "weight_decay=0.0", "weight_decay is 0.0: want 0.1"),
    "gradient in its own dtype": Mutation("grad.to(param.dtype)", "grad", "grads is bfloat16"),
    "empty tensors too": Mutation("if not param.numel():", "if False:", "forward called"),
    "forms not put together": Mutation("@piecewise\n", "", "exp_avgs is bfloat16"),
}  # fmt: skip
