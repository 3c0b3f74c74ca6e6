"""Triton kernels compiled for an H100: nothing spills, and enough programs fit on a multiprocessor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("triton")

from mindspeed_lite.ops.activation.reference import GATED
from mindspeed_lite.ops.adamw import cuda as adamw
from mindspeed_lite.ops.cross_entropy import cuda as cross_entropy
from mindspeed_lite.ops.permute import cuda as permute
from mindspeed_lite.ops.row_kernels import launch
from tests.ops.triton_compile import Resources, compile_sm90

# Kernel, types of its arguments, constants, warps; most registers of a thread. A multiprocessor has 65536.
Row = tuple[str, str, dict[str, Any], int, int]


def activation() -> Iterator[Row]:
    types = "x=*bf16 bias=*bf16 weights=*fp32 stride=i64 linear_offset=fp32 clamp=fp32"
    for kind in ("swiglu", "squared_relu"):
        gated = kind in GATED
        how = {"HALF": 14336, "KIND": kind, "GATED": gated, "HAS_BIAS": True, "HAS_WEIGHTS": True, "BLOCK": 1024}
        how |= {"PIECES": 1, "BENT": 3 if gated else 0}
        yield "activation.cuda:forward_kernel", f"{types} y=*bf16", how, 4, 64
        back = f"{types} dy=*bf16 dx=*bf16 dweights=*fp32"
        yield "activation.cuda:backward_kernel", back, {**how, "WANTS_DWEIGHTS": True}, 4, 64


def adamw_steps() -> Iterator[Row]:
    types = "addresses=*i64 pieces=*i32 scale_tensor=*fp32 scale=fp32 keep=fp32 l2=fp32 beta1_rest=fp32 beta2=fp32 "
    types += "beta2_rest=fp32 rate=fp32 root=fp32 eps=fp32 seed=i32"
    fixed = {"L2": False, "ALIGNED": True, "BLOCK": adamw._BLOCK}
    for grad in ("fp32", "bf16"):
        for out, halves, moments in (
            (None, False, "fp32"), ("bf16", False, "fp32"), (None, True, "fp32"), (None, True, "bf16"),
            (None, True, "uint8"),
        ):  # fmt: skip
            how = {"GRAD": grad, "OUT": out, "HALVES": halves, "MOMENTS": moments, **fixed}
            # Three programs share a processor; two, where beside the numbers stand the bits to encode.
            yield "adamw.kernel:step", types, how, adamw._WARPS, 128 if moments == "uint8" else 80


def cross_entropies() -> Iterator[Row]:
    block, warps = {"BLOCK": cross_entropy.BLOCK}, cross_entropy.WARPS
    for dtype in ("bf16", "fp32"):
        types = f"logits_ptr=*{dtype} target_ptr=*i64 start=i32"
        how = {"WIDTH": 32768, **block}
        yield "cross_entropy.cuda:statistics_kernel", f"{types} out_ptr=*fp32 rows=i32", how, warps, 64
        back = f"{types} top_ptr=*fp32 sums_ptr=*fp32 dloss_ptr=*fp32 out_ptr=*{dtype} width=i32"
        yield "cross_entropy.cuda:gradient_kernel", back, block, warps, 64


def moe_router() -> Iterator[Row]:
    types = "rows=i32 stride=i32 scale=fp32 indices=*i32"
    for experts, topk in ((64, 6), (256, 8)):
        tile = launch(experts)
        how = {"EXPERTS": experts, "ROWS": tile.rows, "BLOCK": tile.block, "TOPK": topk}
        scores = {**how, "KBLOCK": 8, "SCORES": "sigmoid", "NORMALISED": True}
        groups = {"GROUPS": 8, "GROUPS_CHOSEN": 4, "GROUP_BEST": 2, "GBLOCK": 8, "KEEPS": True}
        forward = f"{types} scores=*fp32 bias=*fp32 probs=*bf16 chosen=*i1 kept=*fp32"
        yield "moe_router.kernels:forward_kernel", forward, {**scores, **groups}, tile.warps, 128
        back = f"{types} dprobs=*bf16 kept=*fp32 dlogits=*bf16"
        yield "moe_router.kernels:backward_kernel", back, {**scores, "SCORES": "sqrtsoftplus"}, tile.warps, 128
        back = f"{types} dprobs=*bf16 logits=*bf16 dlogits=*bf16 logits_stride=i32"
        yield "moe_router.kernels:backward_all_kernel", back, how, tile.warps, 128


def permutes() -> Iterator[Row]:
    sizes = "tokens=i32 experts=i32 blocks=i32"
    of_pairs = f"routed=*u8 ends=*i32 offsets=*i32 {sizes} limit=i32 stride=i32 flat=i32"
    for tokens, experts in ((4, 256), (128, 8)):
        assert tokens * experts == permute._PAIRS
        how = {"TOKENS": tokens, "EXPERTS": experts}
        yield "permute.kernels:count_kernel", f"routed=*u8 counts=*i32 {sizes}", how, 4, 128
        yield "permute.kernels:pair_kernel", f"{of_pairs} pairs=*i32", how, 4, 128
        yield "permute.kernels:order_kernel", f"{of_pairs} order=*i32", how, 4, 128
    how = {"WIDTH": 4096, "BLOCK": 1024}
    for dtype in ("bf16", "fp32"):
        types = f"order=*i32 offsets=*i32 x=*{dtype} stride=i32"
        pairs = f"{types} pairs=*i32 probs=*fp32"
        yield "permute.kernels:spread_kernel", f"{types} out=*{dtype}", how, 4, 64
        yield "permute.kernels:gather_kernel", f"{pairs} out=*{dtype}", {**how, "HAS_PROBS": True}, 4, 64
        back = f"{pairs} dy=*{dtype} dx=*{dtype} dprobs=*fp32 dy_stride=i32"
        yield "permute.kernels:backward_kernel", back, {**how, "WANTS_DPROBS": True}, 4, 64


def rope() -> Iterator[Row]:
    types = "x=*bf16 cos=*fp32 sin=*fp32 positions=*i64 y=*bf16 scale=fp32 b=i32 n=i32 d=i32 width=i32 start=i32 "
    types += "rows=i32 stride_s=i32 stride_b=i32 stride_n=i32 row=i32 batch=i32"
    fixed = {"TRANSPOSED": True, "PASSED": 64, "BLOCK_PAIRS": 64, "BLOCK_HEADS": 16}
    for into in (False, True):
        for out in (False, True):
            yield "rope.cuda:_kernel", types, {"INTO": into, "OUT": out, **fixed}, 4, 96


def compiled(row: Row) -> Resources:
    kernel, types, constants, warps, _ = row
    signature = dict(each.split("=") for each in types.split())
    return compile_sm90(f"mindspeed_lite.ops.{kernel}", signature, constants, num_warps=warps)


def test_a_thread_rescales_once_for_each_vector() -> None:
    """Statistics of cross_entropy: a thread has 16 elements, in vectors of 16 bytes, and ends with two exponentials."""
    rows = {row[1].split()[0]: row for row in cross_entropies() if "statistics" in row[0]}
    for dtype, vectors in (("bf16", 2), ("fp32", 4)):
        assert compiled(rows[f"logits_ptr=*{dtype}"]).special == 16 + 2 * vectors


ROWS = [*activation(), *adamw_steps(), *cross_entropies(), *moe_router(), *permutes(), *rope()]


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0]}-{place}" for place, row in enumerate(ROWS)])
def test_it_stays_in_registers(row: Row) -> None:
    found = compiled(row)
    assert found.spills == 0 and found.registers <= row[-1], found
    if row[0].startswith("adamw"):
        # Shared memory turns fp32's order of elements into that of 16 bit, where there is any.
        only_fp32 = row[2]["GRAD"] == "fp32" and row[2]["OUT"] is None and not row[2]["HALVES"]
        assert found.shared <= (0 if only_fp32 else 4 * adamw._BLOCK)
