"""grouped_matmul on CUDA: what its kernels need, and the choice of tiles."""

from __future__ import annotations

import pytest
import torch

from tests.ops.triton_compile import Resources, compile_for

cuda = pytest.importorskip("mindspeed_lite.ops.grouped_matmul.cuda")

SIZES = {"N": 1536, "K": 2048, "EXPERTS": 64, "PADDED": 64, "ALIGNED": True, "PRECISION": "ieee", "GROUP": cuda.GROUP}
ARCHS = (90, 100)


def fits(found: Resources, tiles: cuda.Tiles) -> bool:
    """No spills, and as many programs on a multiprocessor as are launched."""
    return found.spills == 0 and found.programs >= 8 // tiles.warps


def shape(tiles: cuda.Tiles) -> dict[str, int]:
    return {"ROWS": tiles.rows, "WIDTH": tiles.width, "DEPTH": tiles.depth}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("name", "dtype", "transposed"),
    [("HUGE", "bf16", True), ("LARGE", "bf16", True), ("LARGE", "fp16", False),
     ("FLAT", "bf16", True), ("THIN", "bf16", True), ("WIDE", "fp32", False)],
)  # fmt: skip
def test_the_product_compiles(arch: int, name: str, dtype: str, transposed: bool) -> None:
    tiles = getattr(cuda, name)
    found = compile_for(
        arch,
        "mindspeed_lite.ops.grouped_matmul.cuda:product_kernel",
        {**dict.fromkeys(("x_ptr", "y_ptr"), f"*{dtype}"),
         **dict.fromkeys(("weights_ptr", "biases_ptr", "counts_ptr"), "*i64")},
        {**SIZES, **shape(tiles), "TRANSPOSED": transposed, "BIASED": True},
        **tiles.options,
    )  # fmt: skip
    assert fits(found, tiles), found


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("name", "dtype", "adds"), [("GRADIENT", "bf16", True), ("GRADIENT", "fp16", False),
                                                     ("WIDE", "fp32", True)])  # fmt: skip
def test_the_weight_gradient_compiles(arch: int, name: str, dtype: str, adds: bool) -> None:
    tiles = getattr(cuda, name)
    found = compile_for(
        arch,
        "mindspeed_lite.ops.grouped_matmul.cuda:gradient_kernel",
        {"dy_ptr": f"*{dtype}", "x_ptr": f"*{dtype}", "out_ptr": "*fp32" if adds else f"*{dtype}",
         "counts_ptr": "*i64", "main_grads_ptr": "*i64"},
        {**SIZES, **shape(tiles), "ADDS": adds},
        **tiles.options,
    )  # fmt: skip
    assert found.spills == 0 and found.programs >= 2, found


@pytest.mark.parametrize(
    ("rows", "experts", "n", "dtype", "name"),
    [
        (65536, 8, 4096, torch.bfloat16, "HUGE"),
        (65536, 8, 512, torch.bfloat16, "LARGE"),
        (8192, 64, 4096, torch.bfloat16, "LARGE"),
        (4096, 64, 4096, torch.float16, "FLAT"),
        (512, 64, 4096, torch.bfloat16, "THIN"),
        (65536, 8, 4096, torch.float32, "WIDE"),
    ],
)
def test_tiles_follow_the_rows_of_an_expert(rows: int, experts: int, n: int, dtype: torch.dtype, name: str) -> None:
    x = torch.empty(rows, 64, dtype=dtype, device="meta")
    assert cuda._tiles(x, experts, n) == getattr(cuda, name)
