"""The Triton kernels of rms_norm and layer_norm: against float64, and compiled for a GPU that is not here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindspeed_lite.ops.norm import cuda, reference
from tests.harness import errors, matrix
from tests.ops.triton_compile import compile_for

norm_kernels = pytest.importorskip("mindspeed_lite.ops.norm.kernels")

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
NAMES = ("y", "dx", "dweight", "dbias")
EPS = 1e-5
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def results(function: Any, tensors: list[torch.Tensor | None], zero_centered: bool) -> list[torch.Tensor]:
    """y and the gradients of function(x, weight, bias, eps, zero_centered)."""
    x, weight, bias, dy = tensors
    leaves = [each.detach().requires_grad_() for each in (x, weight, bias) if each is not None]
    given = leaves if bias is not None else [*leaves, None]
    y = function(*given, EPS, zero_centered)
    return [each.detach() for each in (y, *torch.autograd.grad(y, leaves, dy))]


@pytest.mark.usefixtures("triton_runs")
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype", "weight_dtype", "zero_centered"),
    [
        ((5, 33), FP32, FP32, False),
        ((3, 7, 64), BF16, FP32, True),
        ((2, 1100), FP16, FP16, False),
        ((2, 4112), FP32, FP32, True),  # two programs for a row
        ((2, 8193), BF16, BF16, True),  # three, the last with a column
    ],
)
def test_against_float64(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    zero_centered: bool,
    centered: bool,
) -> None:
    generator = torch.Generator().manual_seed(len(shape) + shape[-1])

    def normal(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    width = shape[-1]
    wide = normal(*shape[:-1], 2 * width) + 1  # rows twice as far apart
    weight, bias = normal(width, dtype=weight_dtype), normal(width, dtype=weight_dtype) if centered else None
    tensors = [wide[..., :width], weight, bias, normal(*shape)]
    exact = results(reference.norm, [None if t is None else t.double() for t in tensors], zero_centered)
    got = results(norm_kernels.norm, [None if t is None else t.to(DEVICE) for t in tensors], zero_centered)
    rows = wide.numel() // (2 * width)
    for name, ours, truth in zip(NAMES, got, exact, strict=False):
        ours = ours.cpu()
        # The interpreter cuts a float32 to bfloat16 where a GPU rounds: twice as far off.
        cut = not HAS_GPU and ours.dtype == BF16
        allowed = errors.bound(ours.dtype, max(rows, width), roundings=4 if cut else 1)
        errors.assert_within(ours, truth, allowed, name=name)
        wrong_ones = errors.mutations(truth.to(ours.dtype), generator)
        accepted = [wrong_name for wrong_name, wrong in wrong_ones if errors.is_within(wrong, truth, allowed)]
        assert not accepted, (name, accepted)


# Bytes that a multiprocessor must have under way: bandwidth times 0.8 us, of an H100 (132) and of a B200 (148).
UNDER_WAY = {90: 3.35e12 * 0.8e-6 / 132, 100: 8e12 * 0.8e-6 / 148}
TRITON_TYPE = {BF16: "*bf16", FP16: "*fp16", FP32: "*fp32"}


def compiled(arch: int, width: int, dtype: torch.dtype, weight: torch.dtype, centered: bool, back: bool) -> Any:
    """The kernel as it would be launched for rows of this width, and its plan."""
    aligned = width % 16 == 0
    plan = norm_kernels.plan_backward(width, dtype.itemsize, aligned) if back else norm_kernels.plan_forward(width)
    rows, factors = ("dy", "x", "dx") if back else ("x", "y"), TRITON_TYPE[weight]
    strides = ("dy_stride", "x_stride") if back else ("x_stride",)
    signature = dict.fromkeys(rows, TRITON_TYPE[dtype]) | dict.fromkeys(("rows", "width", *strides), "i32")
    signature |= {"weight": factors, "mean": "*fp32", "rstd": "*fp32"}
    signature |= {"parts": "*fp32"} if back else {"bias": factors, "eps": "fp32"}
    constants = {"ROWS": plan.rows, "BLOCK": plan.block, "SPLITS": plan.splits}
    constants |= {"CENTERED": centered, "ZERO_CENTERED": True} | ({"STAGES": plan.stages} if back else {})
    kernel = f"mindspeed_lite.ops.norm.kernels:{'backward' if back else 'forward'}_kernel"
    divisible = ("width", *strides) if aligned else ()
    return compile_for(arch, kernel, signature, constants, divisible, **plan.options), plan


# Rows of one program, of many blocks, and of a width that nothing divides; the rest in `make test-whole`.
QUICK = [(64, BF16, FP32), (5120, BF16, BF16), (16384, FP32, FP32), (5121, BF16, FP32)]
WIDTHS = [*QUICK, (1024, BF16, BF16), (4096, FP32, FP32), (8192, FP32, FP32), (8192, BF16, FP32), (12288, FP16, FP32),
          (16384, BF16, BF16), (16383, FP32, FP32)]  # fmt: skip


@pytest.mark.parametrize(("width", "dtype", "weight"), matrix.only(QUICK, WIDTHS))
def test_no_width_spills_and_prefetches_suffice(width: int, dtype: torch.dtype, weight: torch.dtype) -> None:
    for arch, wanted in UNDER_WAY.items():
        for back in (False, True):
            # layer_norm's kernel does what rms_norm's does, and more.
            found, plan = compiled(arch, width, dtype, weight, True, back)
            assert found.spills == 0 and found.programs >= plan.resident, (arch, back, found, plan)
            tile = plan.rows * min(plan.block, width) * dtype.itemsize * (2 if back else 1)
            if plan.stages > 1:
                assert plan.resident * (plan.stages - 1) * tile >= wanted, (arch, back, found, plan)


@pytest.mark.parametrize(
    ("shape", "is_torch"),
    [((2048, 4096), True), ((2049, 4096), False), ((1 << 20, 128), False), ((64, 128), False), ((1024, 16384), False),
     ((1024, 16385), True)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [BF16, FP32, torch.float64])
def test_pytorch_serves_small_tensors_long_rows_and_float64(
    shape: tuple[int, int], is_torch: bool, dtype: torch.dtype
) -> None:
    wanted = is_torch or dtype == torch.float64
    x, weight = torch.empty(shape, dtype=dtype, device="meta"), torch.empty(shape[1], dtype=dtype, device="meta")
    taken: list[str] = []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm_kernels, "norm", lambda *given: taken.append("triton"))
        patch.setattr(torch.nn.functional, "rms_norm", lambda *given: taken.append("torch"))
        cuda.norm(x, weight, None, EPS, False)
    assert taken == ["torch" if wanted else "triton"]


@pytest.mark.parametrize(("arch", "back"), [(90, True), (100, True), (90, False), (100, False)])
def test_rms_norm_does_not_spill_either(arch: int, back: bool) -> None:
    for width, dtype in ((16384, BF16), (8192, FP32)):
        found, plan = compiled(arch, width, dtype, dtype, False, back)
        assert found.spills == 0 and found.programs >= plan.resident, (found, plan)


def test_every_width_has_a_plan_that_covers_it() -> None:
    for width in range(1, cuda.WIDEST + 1, 7):
        backward = [norm_kernels.plan_backward(width, itemsize, width % 16 == 0) for itemsize in (2, 4)]
        for plan in (norm_kernels.plan_forward(width), *backward):
            assert plan.block * plan.splits >= width > plan.block * (plan.splits - 1)
            assert 4 <= plan.warps <= 16 and plan.rows * plan.block <= 32 * 32 * plan.warps
