"""`mindspeed_lite.ops.rope` on npu_rotary_mul, which is also its own gradient, with other factors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tests.npu_contract.definitions import (
    DTYPES,
    ContractCase,
    Mutation,
    Tensors,
    by_name,
    is_tensor,
)
from tests.npu_contract.recorder import Call, Tensor

# Of the half that changes its place; cos and sin run once for the whole model.
UNFUSED = ("aten::neg",)


@dataclass(frozen=True)
class Rope(ContractCase):
    """`mindspeed_lite.ops.rope.rope` of x [s, b, n, d] or, packed, [t, n, d]."""

    name: str
    shape: tuple[int, ...] = (6, 2, 4, 64)
    dtype: str = "bfloat16"
    pairs: str = "half"
    width: int = 64
    start: int = 0
    scale: float = 1.0
    batch: int = 1
    rows: int = 6

    operator = "rope"
    forward = "npu_rotary_mul"
    backward = "npu_rotary_mul"

    def leaves(self, device: str) -> Tensors:
        return {"x": torch.zeros(self.shape, dtype=getattr(torch, self.dtype), device=device).requires_grad_()}

    def run(self, leaves: Tensors) -> torch.Tensor:
        from mindspeed_lite.ops.rope import rope

        return rope(leaves["x"], **self._given(leaves["x"].device))

    def arguments(self) -> Mapping[str, Any]:
        s, b, n, _ = self.shape if len(self.shape) == 4 else (self.shape[0], 1, *self.shape[1:])
        factor = Tensor(self.dtype, (s, self.batch, 1, self.width), "")
        return {
            "input": Tensor(self.dtype, (s, b, n, self.width), ""),
            "r1": factor,
            "r2": factor,
            "rotary_mode": "interleave" if self.pairs == "interleaved" else "half",
        }

    def result(self) -> Tensor:
        return Tensor(self.dtype, self.shape, "")

    def _given(self, device: torch.device) -> dict[str, Any]:
        cos, sin = (torch.zeros(self.rows, self.batch, 1, self.width, device=device) for _ in range(2))
        given: dict[str, Any] = {"cos": cos, "sin": sin, "pairs": self.pairs, "start": self.start, "scale": self.scale}
        if len(self.shape) == 3:
            given["positions"] = torch.zeros(self.shape[0], dtype=torch.long, device=device)
        return given


CASES = (
    Rope("half"),
    Rope("interleaved", pairs="interleaved"),
    Rope("regrouped", pairs="regrouped"),
    *(Rope(dtype, dtype=dtype) for dtype in ("float16", "float32")),
    Rope("partial", width=32),
    Rope("partial, interleaved", width=32, pairs="interleaved"),
    Rope("latent query", shape=(6, 2, 4, 192), width=64, start=128, pairs="regrouped"),
    Rope("scaled", scale=1.25),
    Rope("angles of each sequence", batch=2),
    Rope("more rows than tokens", rows=9),
    Rope("packed", shape=(10, 4, 64), rows=5),
    Rope("one key head", shape=(6, 2, 1, 64)),
)


# ---- what is documented ----


def rotary_mul(call: Call) -> Iterator[str]:
    """npu_rotary_mul(input, r1, r2, rotary_mode=) -> y, for input in layout SBND"""
    x, r1, r2, mode = (call.arguments[name] for name in ("input", "r1", "r2", "rotary_mode"))
    yield from by_name(call, "rotary_mode")
    if mode not in ("half", "interleave"):
        yield f"rotary_mode is {mode!r}: want half or interleave"
    if x.dtype not in DTYPES:
        yield f"input is {x.dtype}: want one of {', '.join(DTYPES)}"
    if x.dim != 4 or x.shape[-1] % 2 or not 0 < x.shape[-1] < 896:
        yield f"input is {x}: want [s, b, n, d] with d even and below 896"
        return
    s, b, n, d = x.shape
    if max(b, n) >= 1000 or (mode == "interleave" and b * n >= 1000):
        yield f"input is {x}: too many sequences or heads"
    forms = [(s, 1, 1, d)] if mode == "interleave" else [(s, 1, 1, d), (s, b, 1, d), (s, b, n, d)]
    for name, factor in (("r1", r1), ("r2", r2)):
        if factor.dtype != x.dtype or factor.shape not in forms:
            yield f"{name} is {factor}: want {x.dtype} in one of the shapes {forms}"
    if r1.shape != r2.shape:
        yield f"r1 is {r1} and r2 {r2}: want one shape"
    if call.results is not None:
        yield from is_tensor("result 0 (y)", call.results[0], x.dtype, x.shape)


CONTRACTS = {"npu_rotary_mul": rotary_mul}

MUTATIONS = {
    "mode by position": Mutation("rotary_mode=", "", "rotary_mode not passed by name"),
    "halves for pairs": Mutation('"interleave" if into and out else "half"', '"half"', "rotary_mode is half"),
    "factors in fp32": Mutation("lambda: cos.to(dtype)", "lambda: cos", "r1 is float32"),
    "factors of every row": Mutation("t[: x.shape[0]] if", "t if", "r1 is bfloat16[9, 1, 1, 64]"),
    "the whole head": Mutation("torch_npu.npu_rotary_mul(turned,", "torch_npu.npu_rotary_mul(x,", "input is"),
    "the rest of the head lost": Mutation(
        "return y if y.shape == x.shape else torch.cat((before, y, after), -1)", "return y", "the output is"
    ),
}  # fmt: skip
