"""`mindspeed_lite.ops.rope` on npu_rotary_mul, which is also its own gradient, with other factors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mindspeed_lite.ops.rope import rope as operator
from tests.npu_contract.definitions import DTYPES, Call, Make, OperatorCall, by_name, is_tensor

# Of the half that changes its place; cos and sin run once for the whole model.
UNFUSED = ("aten::neg",)


def _rope(
    *shape: int, dtype: str = "bfloat16", width: int = 64, rows: int = 6, batch: int = 1, **options: Any
) -> OperatorCall:
    """Of x [s, b, n, d] or, packed, [t, n, d]."""

    def call(make: Make) -> Any:
        x = make(*shape, dtype=dtype)
        cos, sin = (make(rows, batch, 1, width, dtype="float32", grad=False).sin() for _ in range(2))
        more = {"positions": make.of(torch.arange(shape[0]) % rows)} if len(shape) == 3 else {}
        return operator(x, cos, sin, **options, **more)

    return call


CALLS = {
    "float16, scaled": _rope(6, 2, 4, 64, dtype="float16", scale=0.5),
    "partial, interleaved": _rope(6, 2, 4, 64, width=32, pairs="interleaved"),
    "latent query": _rope(6, 2, 4, 192, start=128, pairs="regrouped"),
    "angles of each sequence": _rope(6, 2, 4, 64, batch=2),
    "more rows than tokens": _rope(6, 2, 4, 64, rows=9),
    "packed": _rope(10, 4, 64, rows=5),
}


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
