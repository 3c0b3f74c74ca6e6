"""accumulate_wgrad: its reference against autograd, and every other path against the reference in float64."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mindspeed_lite.ops import native
from mindspeed_lite.ops.accumulate_wgrad import OPERATOR, Case, accumulate_wgrad, cpu, cuda, reference, why_not
from mindspeed_lite.ops.dispatch import force
from mindspeed_lite.platform import cache, cpu_matmul
from tests.harness.compare import error, one_thread

HALF = (torch.bfloat16, torch.float16)
_WHY_NOT = cpu.kernel_unusable() if cpu_matmul.has_bf16() else "the processor has no bf16 products"
has_kernel = pytest.mark.skipif(_WHY_NOT is not None, reason=f"no CPU kernel: {_WHY_NOT}")


def make(
    rows: int, n: int, k: int, dtype: torch.dtype, main_dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """main_grad, dy, x"""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((n, k), (rows, n), (rows, k))
    main_grad, dy, x = (torch.randn(shape, generator=generator) for shape in shapes)
    return main_grad.to(main_dtype), dy.to(dtype), x.to(dtype)


def exactly(main_grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return reference.accumulate_wgrad(main_grad.double(), dy.double(), x.double())


def unfused(main_grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What is replaced: autograd's product and the addition of a gradient hook."""
    return main_grad.clone().add_(dy.t() @ x)


def on(backend: str, main_grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with force("accumulate_wgrad", backend):
        return accumulate_wgrad(main_grad.clone(), dy, x)


def test_reference_is_the_formula() -> None:
    main_grad = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, -1.0]])
    dy, x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    expected = torch.tensor([[2.0, 5.0, 7.0], [2.0, 4.0, 5.0]])
    assert torch.equal(reference.accumulate_wgrad(main_grad, dy, x), expected)


def test_it_is_the_gradient_of_a_linear_layer() -> None:
    main_grad, dy, x = make(5, 3, 4, torch.float64, torch.float64)
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    torch.nn.functional.linear(x, weight).backward(dy)
    expected = main_grad + weight.grad
    torch.testing.assert_close(accumulate_wgrad(main_grad, dy, x), expected)


def test_it_writes_in_place_and_says_so_to_autograd() -> None:
    main_grad, dy, x = make(40, 33, 17, torch.bfloat16)
    before, version = main_grad.clone(), main_grad._version
    assert accumulate_wgrad(main_grad, dy, x) is main_grad
    assert not torch.equal(main_grad, before) and main_grad._version > version
    assert not main_grad.requires_grad


def test_the_reference_is_bitwise_what_megatron_computes_without_the_fusion() -> None:
    main_grad, dy, x = make(64, 48, 32, torch.bfloat16)
    assert torch.equal(on("reference", main_grad, dy, x), unfused(main_grad, dy, x))


@settings(max_examples=50)
@given(
    rows=st.integers(1, 140),
    n=st.integers(1, 230),
    k=st.integers(1, 150),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    same=st.booleans(),
    seed=st.integers(0, 1000),
)
@example(rows=1025, n=97, k=65, dtype=torch.bfloat16, same=False, seed=0)  # a second step through the rows
@example(rows=1, n=1, k=1, dtype=torch.bfloat16, same=False, seed=0)
def test_error_is_not_above_that_of_the_unfused_path(
    rows: int, n: int, k: int, dtype: torch.dtype, same: bool, seed: int
) -> None:
    tensors = make(rows, n, k, dtype, dtype if same else torch.float32, seed)
    with one_thread():
        got, replaced, exact = accumulate_wgrad(tensors[0].clone(), *tensors[1:]), unfused(*tensors), exactly(*tensors)
    # Sums of up to 1025 terms in another order, of which the largest parts may cancel.
    sizes = exactly(*(each.abs() for each in tensors))
    cancelled = sizes.norm().item() / (exact.norm().item() or 1.0)
    assert error(got, exact) <= error(replaced, exact) + 4 * cancelled * torch.finfo(torch.float32).eps


@has_kernel
@pytest.mark.parametrize("rows", [1, 2, 31, 33, 1024, 1056, 2100])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (96, 64), (97, 65), (200, 130)])
def test_the_kernel_rounds_nothing_but_fp32_sums(rows: int, n: int, k: int) -> None:
    tensors = make(rows, n, k, torch.bfloat16)
    assert why_not(*tensors) == []
    # Products of bf16 numbers are exact in fp32; one rounding for each addition, of which most cancel.
    assert error(on("cpu", *tensors), exactly(*tensors)) <= 4 * torch.finfo(torch.float32).eps


@has_kernel
def test_views_with_strides() -> None:
    main_grad, dy, x = make(66, 40, 24, torch.bfloat16)
    exact = exactly(main_grad, dy[::2], x[::2])
    wide = torch.zeros(66, 100, dtype=torch.bfloat16)
    for strided_dy, strided_x in (
        (dy[::2], x[::2]),
        (dy[::2].t().contiguous().t(), x[::2].t().contiguous().t()),
        (wide[:33, 5:45].copy_(dy[::2]), wide[33:, 60:84].copy_(x[::2])),
    ):
        assert error(on("cpu", main_grad, strided_dy, strided_x), exact) < 1e-6
    one = torch.ones(1, 40, dtype=torch.bfloat16).expand(33, 40)
    assert error(on("cpu", main_grad, one, x[::2]), exactly(main_grad, one, x[::2])) < 1e-6
    part = torch.zeros(40, 48)[:, :24]
    assert why_not(part, dy, x) == ["main_grad is not contiguous"]
    assert torch.equal(accumulate_wgrad(part, dy, x), unfused(torch.zeros(40, 24), dy, x))


@has_kernel
def test_extreme_values_stay_where_they_are() -> None:
    main_grad, dy, x = make(40, 100, 70, torch.bfloat16)
    dy[3, 5], x[7, 9], x[3, 11] = float("inf"), float("nan"), 0.0
    got = on("cpu", main_grad, dy, x)
    clean = torch.ones(100, 70, dtype=torch.bool)
    clean[5], clean[:, 9] = False, False
    assert torch.equal(got.isfinite(), clean)
    assert got[0, 9].isnan() and got[5, 11].isnan() and got[5, 0].isinf()
    big = torch.full((64, 64), 1e18, dtype=torch.bfloat16)
    assert bool(on("cpu", torch.zeros(64, 64), big, big).isfinite().all())  # 6.4e37, near the end of fp32
    assert bool(on("cpu", torch.zeros(64, 64), big * 100, big * 100).isinf().all())


@has_kernel
@pytest.mark.parametrize(("rows", "n", "k"), [(300, 64, 520), (64, 700, 64)])
def test_bits_do_not_depend_on_the_number_of_threads(
    rows: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = make(rows, n, k, torch.bfloat16)
    results = []
    for threads in (1, 2, 3, 7):
        monkeypatch.setattr(native, "threads", lambda work, threads=threads: threads)
        results += [on("cpu", *tensors), on("cpu", *tensors)]
    assert all(torch.equal(results[0], each) for each in results)


@pytest.mark.parametrize("shapes", [(0, 4, 3), (5, 0, 3), (5, 4, 0)])
def test_nothing_to_add(shapes: tuple[int, int, int]) -> None:
    main_grad, dy, x = make(*shapes, torch.bfloat16)
    assert torch.equal(accumulate_wgrad(main_grad.clone(), dy, x), main_grad)


def test_what_does_not_fit_is_an_error() -> None:
    main_grad, dy, x = make(5, 4, 3, torch.bfloat16)
    for wrong in ((main_grad.t(), dy, x), (main_grad, dy[:4], x), (main_grad, dy[None], x), (main_grad[0], dy, x)):
        with pytest.raises(ValueError, match="want main_grad"):
            accumulate_wgrad(*wrong)
    with pytest.raises(ValueError, match="want one dtype"):
        accumulate_wgrad(main_grad, dy.float(), x)


def test_dtypes_without_a_kernel_have_a_reason_and_the_reference() -> None:
    main_grad, dy, x = make(8, 8, 8, torch.float16)
    (reason,) = why_not(main_grad, dy, x)
    assert "float16" in reason and "bfloat16" in reason
    assert torch.equal(accumulate_wgrad(main_grad.clone(), dy, x), unfused(main_grad, dy, x))
    for dtype in (*HALF, torch.float32, torch.float64):
        assert why_not(*make(8, 8, 8, dtype, dtype)) == []


def test_without_a_compiler_the_reference_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert shutil.which("g++") is None
    monkeypatch.setattr(cpu_matmul, "has_bf16", lambda: True)
    native._compiler.cache_clear()
    monkeypatch.setattr(cpu, "_lib", native.Library(cpu._lib.source, cpu._lib.functions, uses_torch=True))
    OPERATOR.forget()
    try:
        tensors = make(40, 30, 20, torch.bfloat16)
        (reason,) = why_not(*tensors)
        assert "no C++ compiler" in reason
        assert torch.equal(accumulate_wgrad(tensors[0].clone(), *tensors[1:]), unfused(*tensors))
    finally:
        native._compiler.cache_clear()
        OPERATOR.forget()


def test_a_processor_without_the_micro_kernel_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def unusable(self) -> None:
            return None

        def probe(self, size: int, right: int) -> None:
            """PyTorch threw: the answer stays 0."""

    monkeypatch.setattr(cpu, "_lib", Library())
    monkeypatch.setattr(cpu_matmul, "has_bf16", lambda: True)
    assert cpu.supported(Case("cpu", torch.bfloat16, torch.float32, True)) == [
        "oneDNN has no bfloat16 micro-kernel for this processor"
    ]


@pytest.mark.parametrize("rows", [1, 33, 1056])
def test_a_processor_without_bf16_products_gets_widened_inputs(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_matmul, "has_bf16", lambda: False)
    OPERATOR.forget()
    try:
        main_grad, dy, x = make(rows, 97, 65, torch.bfloat16)
        assert why_not(main_grad, dy, x) == []
        got = accumulate_wgrad(main_grad.clone(), dy, x)
        assert error(got, exactly(main_grad, dy, x)) <= 4 * torch.finfo(torch.float32).eps
        part = torch.zeros(97, 130)[:, :65]
        assert torch.equal(accumulate_wgrad(part, dy, x), accumulate_wgrad(torch.zeros(97, 65), dy, x))
    finally:
        OPERATOR.forget()


@pytest.mark.parametrize("mode", ["fake", "compiled"])
def test_tensors_without_memory_take_the_plain_way(mode: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    if mode == "fake":
        with FakeTensorMode():
            main_grad, dy, x = torch.zeros(8, 4), *(torch.zeros(6, n, dtype=torch.bfloat16) for n in (8, 4))
            assert accumulate_wgrad(main_grad, dy, x) is main_grad
            assert cuda.accumulate_wgrad(main_grad, dy, x) is main_grad
        return
    tensors = make(40, 30, 20, torch.bfloat16)
    step = torch.compile(accumulate_wgrad, backend="eager")
    assert torch.equal(step(tensors[0].clone(), *tensors[1:]), unfused(*tensors))


# ---- CUDA ----


def test_the_cuda_call_fits_the_schema() -> None:
    """Without a GPU all there is to see is the operator's schema: PyTorch's meta kernel for it is broken."""
    schema = torch.ops.aten.addmm.dtype_out._schema
    assert [each.name for each in schema.arguments] == "self mat1 mat2 out_dtype beta alpha out".split()
    assert {each.name: each.default_value for each in schema.arguments}["beta"] == 1
    if torch.version.cuda is not None:
        assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::addmm.dtype_out", "CUDA")


def test_what_cublas_does_not_take_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for main_dtype in (torch.float16, torch.float64):
        assert cuda.supported(Case("cuda", torch.bfloat16, main_dtype, True))
    assert cuda.supported(Case("cuda", torch.float32, torch.float32, True)) == []

    def refuse(*tensors: Any) -> None:
        raise RuntimeError("self and mat2 must have the same dtype")

    monkeypatch.setattr(cuda, "_add_product", refuse)
    monkeypatch.setattr(torch, "ones", lambda *shape, **kwargs: torch.zeros(*shape))
    cuda._refusal.cache_clear()
    try:
        (reason,) = cuda.supported(Case("cuda", torch.bfloat16, torch.float32, True))
        assert "does not add a 16-bit product to an fp32 matrix: self and mat2" in reason
    finally:
        cuda._refusal.cache_clear()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", HALF)
def test_cuda_accumulates_in_fp32(dtype: torch.dtype) -> None:
    tensors = make(300, 130, 70, dtype)
    got = on("cuda", *(each.cuda() for each in tensors)).cpu()
    assert error(got, exactly(*tensors)) <= 4 * torch.finfo(torch.float32).eps


# ---- NPU, on the emulation of its documentation ----


@pytest.mark.usefixtures("npu_twin")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 1, 1), (33, 12, 20)])
def test_npu(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    main_grad, dy, x = make(rows, n, k, dtype)
    for one, other in ((dy, x), (dy.t().contiguous().t(), x.t().contiguous().t())):
        got = on("npu", main_grad, one, other)
        assert error(got, exactly(main_grad, dy, x)) <= 4 * torch.finfo(torch.float32).eps


@pytest.mark.usefixtures("npu_twin")
def test_npu_reasons_and_one_dtype() -> None:
    tensors = make(6, 5, 4, torch.float32, torch.float32)
    assert error(on("npu", *tensors), exactly(*tensors)) < 1e-6
    with force("accumulate_wgrad", "npu"):
        assert "takes float16 and bfloat16" in why_not(*make(6, 5, 4, torch.float64))[0]
        main_grad, dy, x = make(6, 5, 4, torch.bfloat16, torch.float64)
        assert "accumulates in float32" in why_not(main_grad, dy, x)[0]
        assert "not contiguous" in why_not(torch.zeros(4, 5).t(), dy, x)[0]


def test_the_twin_notices_wrong_calls() -> None:
    from .twin.accumulate_wgrad import npu_grouped_matmul_add_

    main_grad, dy, x = make(6, 5, 4, torch.bfloat16)
    ends = torch.tensor([6])
    good: dict[str, Any] = {"input": main_grad[None], "x": dy, "weight": x, "group_list": ends}
    npu_grouped_matmul_add_(**good)
    wrong: list[dict[str, Any]] = [
        {"input": main_grad},
        {"x": x, "weight": dy},
        {"x": dy.float()},
        {"group_list": ends.int()},
        {"group_list": ends + 1},
        {"transpose_x": False},
        {"x": dy.t().contiguous().t()},
    ]
    for change in wrong:
        with pytest.raises(ValueError):
            npu_grouped_matmul_add_(**{**good, **change})
    unfinished = npu_grouped_matmul_add_(**{**good, "input": main_grad[None].clone(), "group_list": ends - 1})
    assert bool(unfinished.isnan().all())
