"""grouped_matmul on CUDA: what its kernels need, the order of tiles, and when torch's grouped_mm takes over."""

from __future__ import annotations

import logging

import pytest
import torch

from mindspeed_lite.ops.grouped_matmul import reference, torch_grouped
from tests.harness import errors
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
@pytest.mark.parametrize(("name", "dtype", "adds"), [("LARGE", "bf16", True), ("LARGE", "fp16", False),
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
    assert fits(found, tiles), found


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


COUNTS = torch.tensor([3, 0, 5, 8])


@pytest.fixture
def has_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that has PyTorch's kernels; on CPU its loop computes the same."""
    monkeypatch.setattr(torch_grouped, "_missing", lambda: ())


@pytest.mark.usefixtures("has_kernels")
@pytest.mark.parametrize("transposed", [True, False])
def test_one_tensor_of_weights_goes_to_torch(transposed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 24, generator=generator).bfloat16()
    together = torch.randn(4, *((32, 24) if transposed else (24, 32)), generator=generator).bfloat16()
    weights = together.unbind()
    assert torch_grouped.serves(x, weights, None)
    y = torch_grouped.product(x, weights, COUNTS, transposed)
    exact = reference.grouped_matmul(x.double(), together.double(), COUNTS.tolist(), None, transposed)
    allowed = errors.bound(torch.bfloat16, 24)
    errors.assert_within(y, exact, allowed)
    assert not any(errors.is_within(wrong, exact, allowed) for _, wrong in errors.mutations(y, generator))


@pytest.mark.usefixtures("has_kernels")
def test_a_flat_buffer_is_one_tensor_and_separate_weights_are_not() -> None:
    x = torch.zeros(16, 24).bfloat16()
    flat = torch.zeros(8 + 4 * 32 * 24).bfloat16()
    parts = [flat[8 + i * 768 : 8 + (i + 1) * 768].view(32, 24) for i in range(4)]
    assert torch_grouped.serves(x, parts, None) == (flat.data_ptr() % 16 == 0)
    assert not torch_grouped.serves(x, parts[::-1], None)
    assert not torch_grouped.serves(x, [parts[0], parts[2]], None)
    assert not torch_grouped.serves(x, [torch.zeros(32, 24).bfloat16() for _ in range(4)], None)
    assert not torch_grouped.serves(x, [part.t() for part in parts], None)


@pytest.mark.parametrize(
    ("dtype", "width", "biased", "words"),
    [
        (torch.float16, 24, False, "takes bfloat16, not torch.float16"),
        (torch.bfloat16, 24, True, "takes no bias"),
        (torch.bfloat16, 20, False, "multiple of 16 bytes"),
    ],
)
@pytest.mark.usefixtures("has_kernels")
def test_why_not_is_logged_once(
    caplog: pytest.LogCaptureFixture, dtype: torch.dtype, width: int, biased: bool, words: str
) -> None:
    torch_grouped._log_once.cache_clear()
    weights = torch.zeros(4, 32, width, dtype=dtype).unbind()
    biases = [torch.zeros(32, dtype=dtype)] * 4 if biased else None
    with caplog.at_level(logging.INFO, "mindspeed_lite"):
        for _ in range(2):
            assert not torch_grouped.serves(torch.zeros(16, width, dtype=dtype), weights, biases)
    assert [words in each.message for each in caplog.records] == [True]


def test_here_the_reason_is_the_device() -> None:
    if not torch.cuda.is_available():
        assert torch_grouped._missing() == ("grouped_mm's kernels are for CUDA",)
