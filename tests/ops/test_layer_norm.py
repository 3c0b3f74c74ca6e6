"""layer_norm: its reference against the formula, and every other path against the reference in float64."""

from __future__ import annotations

import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.autograd import gradcheck

from mindspeed_lite.ops import norm_cpu
from mindspeed_lite.ops.dispatch import backends, force, selected
from mindspeed_lite.ops.layer_norm import OPERATOR, Case, cuda, layer_norm, reference
from tests.harness.compare import assert_not_worse, error, forward_backward, one_thread
from tests.harness.errors import assert_within, bound
from tests.harness.reasons import why_not_of

why_not = why_not_of(layer_norm)

NAMES = ("y", "dx", "dw", "db")
EPS = 1e-5

# fp32 results of both paths come from the same number of fp32 roundings in another order, in which half a
# unit in the last place either way is chance. A 16-bit result carries one rounding that dwarfs them.
SLACK = torch.finfo(torch.float32).eps / 2

NO_COMPILER = types.SimpleNamespace(unusable=lambda: "no C++ compiler in this test of layer_norm")


@pytest.fixture(params=["kernel", "torch's"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernel, or PyTorch's."""
    if request.param != "kernel":
        monkeypatch.setattr(norm_cpu, "_lib", NO_COMPILER)


def torch_layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, w.shape, w, b, EPS)


def make(
    shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype | None = None, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = (0.5 + torch.randn(shape, generator=generator)).to(dtype)
    w = (1 + 0.2 * torch.randn(shape[-1], generator=generator)).to(weight_dtype or dtype)
    b = torch.randn(shape[-1], generator=generator).to(weight_dtype or dtype)
    return x, w, b, torch.randn(shape, generator=generator).to(dtype)


def test_reference_is_the_formula() -> None:
    x = torch.tensor([[1.0, 5.0]], dtype=torch.float64)  # mean 3, variance 4
    w, b = torch.tensor([2.0, -1.0], dtype=torch.float64), torch.tensor([0.5, 1.0], dtype=torch.float64)
    unit = 2 / 4.5**0.5
    torch.testing.assert_close(
        reference.layer_norm(x, w, b, 0.5), torch.tensor([[0.5 - 2 * unit, 1 - unit]], dtype=torch.float64)
    )
    torch.testing.assert_close(
        reference.layer_norm(x, w, b, 0.5, zero_centered=True),
        torch.tensor([[0.5 - 3 * unit, 1.0]], dtype=torch.float64),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(512, 256), (16, 2048), (3, 5, 7, 33), (129, 1000)])
def test_error_is_not_above_that_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, w, b, dy = make(shape, dtype)
    exact = forward_backward(reference.layer_norm, (x, w, b), dy, torch.float64)
    replaced = forward_backward(torch_layer_norm, (x, w, b), dy)
    assert_not_worse(forward_backward(layer_norm, (x, w, b), dy), replaced, exact, SLACK, NAMES)


def test_gradients_of_parameters_do_not_lose_precision_with_the_number_of_rows() -> None:
    """PyTorch's CPU kernel adds them up in bf16."""
    x, w, b, dy = make((8192, 48), torch.bfloat16)
    exact = forward_backward(reference.layer_norm, (x, w, b), dy, torch.float64)
    got = forward_backward(layer_norm, (x, w, b), dy)
    again = forward_backward(layer_norm, (x, w, b), dy)
    for ours, same, truth in zip(got, again, exact, strict=True):
        assert error(ours, truth) < 2**-8 and torch.equal(ours, same)
    assert error(forward_backward(torch_layer_norm, (x, w, b), dy)[2], exact[2]) > 2**-7


@settings(max_examples=40)
@given(
    shape=st.lists(st.integers(1, 6), max_size=3).flatmap(
        lambda head: st.integers(4, 70).map(lambda width: (*head, width))
    ),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    weight_dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    zero_centered=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_kernel_agrees_with_the_reference(
    shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype, zero_centered: bool, seed: int
) -> None:
    x, w, b, dy = make(shape, dtype, weight_dtype, seed)

    def run(function, precise: torch.dtype | None):  # type: ignore[no-untyped-def]
        return forward_backward(lambda x, w, b: function(x, w, b, EPS, zero_centered), (x, w, b), dy, precise)

    with one_thread():
        exact, got = run(reference.layer_norm, torch.float64), run(layer_norm, None)
    # dx is a difference of terms of the size of dy * w * rstd.
    rstd = (x.double().var(-1, unbiased=False, keepdim=True) + EPS).rsqrt()
    size = (dy.double() * (w.double() + (1 if zero_centered else 0)) * rstd).norm().item()
    rows = x.numel() // shape[-1]
    for name, ours, truth, into in zip(NAMES, got, exact, (dtype, dtype, weight_dtype, weight_dtype), strict=True):
        assert ours.dtype == into, name
        rounded_to, roundings = into, 1
        if dtype == torch.float16:
            # PyTorch's kernel adds the parameters' gradients in fp16: a rounding a row, of a sum that grows.
            rounded_to = max((dtype, into), key=lambda each: torch.finfo(each).eps)
            roundings = 4 + (rows // 2 if name in ("dw", "db") else 0)
        allowed = bound(rounded_to, 70 + 216, roundings=roundings)
        assert_within(ours, truth, allowed, size if name == "dx" else None, name)


def test_rows_of_one_number_are_the_bias(way: None) -> None:
    x, w, b, dy = make((5, 1), torch.bfloat16)
    y, dx, _, db = forward_backward(layer_norm, (x, w, b), dy)
    assert torch.equal(y, b.expand(5, 1)) and error(db, dy.double().sum(0)) < bound(db.dtype, 5, roundings=3)
    assert dx.abs().max() < 1e-3  # zero, but for the rounding of 1 / sqrt(eps) times the sums


@pytest.mark.parametrize("zero_centered", [False, True])
def test_gradcheck(zero_centered: bool) -> None:
    x = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    w, b = (torch.randn(7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    with one_thread():
        for function in (reference.layer_norm, layer_norm):
            assert gradcheck(lambda x, w, b: function(x, w, b, EPS, zero_centered), (x, w, b))  # noqa: B023


def test_strides_do_not_matter(way: None) -> None:
    x, w, b, dy = make((12, 10, 24), torch.float32)
    plain = forward_backward(layer_norm, (x, w, b), dy)
    views = (
        x.transpose(0, 1).contiguous().transpose(0, 1),
        torch.cat([x, x], -1)[..., :24],
        torch.stack([x, x], -1)[..., 0],
    )
    for view in views:
        assert not view.is_contiguous()
        leaf = view.detach().requires_grad_()
        y = layer_norm(leaf, w, b)
        y.backward(dy.transpose(0, 1).contiguous().transpose(0, 1))
        assert torch.equal(y, plain[0]) and torch.equal(leaf.grad, plain[1])


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (8,), (1, 1, 8)])
def test_empty_and_one_dimensional_inputs(shape: tuple[int, ...], way: None) -> None:
    x, w, b, dy = make(shape, torch.bfloat16)
    y, dx, dw, db = forward_backward(layer_norm, (x, w, b), dy)
    assert y.shape == dx.shape == shape and dw.shape == db.shape == (8,)
    if 0 in shape:
        assert not dw.any() and not db.any()


def test_large_means_do_not_cancel() -> None:
    x, w, b, dy = make((64, 256), torch.float32)
    x = x + 1000
    exact = forward_backward(reference.layer_norm, (x, w, b), dy, torch.float64)
    # An fp32 mean of 1000 is half a unit of 2^-14 off, beside deviations of 1.
    for ours, truth in zip(forward_backward(layer_norm, (x, w, b), dy), exact, strict=True):
        assert error(ours, truth) < 2**-13


def test_backward_keeps_x_weight_and_two_numbers_per_row() -> None:
    x, w, b, _ = make((1024, 256), torch.bfloat16)
    saved: list[torch.Tensor] = []
    x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer_norm(x, w, b)
    kept = [t for t in saved if t.data_ptr() not in (x.data_ptr(), w.data_ptr())]
    assert [(t.numel(), t.dtype) for t in kept] == [(1024, torch.float32)] * 2


def test_only_the_wanted_gradients_are_made() -> None:
    x, w, b, dy = make((6, 40), torch.float32)
    full = forward_backward(layer_norm, (x, w, b), dy)[1:]
    for wanted in range(3):
        leaves = [t.clone().requires_grad_(position == wanted) for position, t in enumerate((x, w, b))]
        layer_norm(*leaves).backward(dy)
        assert [leaf.grad is not None for leaf in leaves] == [position == wanted for position in range(3)]
        assert torch.equal(leaves[wanted].grad, full[wanted])


def test_without_a_compiler_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reason = "no C++ compiler (this test of layer_norm has hidden it)"
    monkeypatch.setattr(norm_cpu, "_lib", types.SimpleNamespace(unusable=lambda: reason))
    x, w, b, dy = make((4, 64), torch.bfloat16)
    with caplog.at_level("WARNING", "mindspeed_lite"):
        for _ in range(2):
            got = forward_backward(lambda x, w, b: layer_norm(x, w, b, EPS, True), (x, w, b), dy)
    assert caplog.text.count(reason) == 1 and "PyTorch's own" in caplog.text
    assert torch.equal(got[0], reference.layer_norm(x, w, b, EPS, True))


def test_fake_tensors_and_compilers_have_a_result() -> None:
    with FakeTensorMode():
        x = torch.empty(4, 8, dtype=torch.bfloat16)
        assert layer_norm(x, torch.empty(8), torch.empty(8)).shape == (4, 8)


def test_wrong_arguments_are_refused() -> None:
    x, w = torch.zeros(2, 8), torch.zeros(8)
    for wrong in ((x, torch.zeros(4), w), (x, w, torch.zeros(4)), (x, torch.zeros(2, 8), w)):
        with pytest.raises(ValueError, match="layer_norm: want x"):
            layer_norm(*wrong)
    with pytest.raises(ValueError, match="of one dtype"):
        layer_norm(x, w, w.bfloat16())
    assert why_not(x.int(), w, w) == ["dtype torch.int32"]
    assert any("one dtype" in each for each in cuda.supported(Case("cuda", torch.float64, torch.float32, False)))
    assert cuda.supported(Case("cuda", torch.float16, torch.float32, True)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.usefixtures("npu_twin")
def test_the_npu_path_on_cpu_tensors(dtype: torch.dtype) -> None:
    assert backends("layer_norm")["npu"] == [] and selected("layer_norm", "npu") == ("npu", ())
    x, w, b, dy = make((6, 3, 40), dtype)
    # Weights that 1 + weight represents exactly: the rounding of the sum is the one documented difference.
    w = torch.randint(-8, 8, (40,)).to(dtype) / 16
    with force("layer_norm", "npu"):
        got = forward_backward(lambda x, w, b: layer_norm(x, w, b, EPS, True), (x, w, b), dy)
        assert len(why_not(x.double(), w, b)) == 2
        plain = layer_norm(x, w, b)
    exact = forward_backward(lambda x, w, b: reference.layer_norm(x, w, b, EPS, True), (x, w, b), dy, torch.float64)
    for name, ours, truth in zip(NAMES, got, exact, strict=True):
        assert error(ours, truth) <= bound(dtype, x.shape[0], roundings=3), name
    assert torch.equal(plain, torch_layer_norm(x, w, b))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(129, 1000), (3000, 64)])
def test_cuda(shape: tuple[int, ...], dtype: torch.dtype, zero_centered: bool) -> None:
    x, w, b, dy = make(shape, dtype)
    exact = forward_backward(
        lambda x, w, b: reference.layer_norm(x, w, b, EPS, zero_centered), (x, w, b), dy, torch.float64
    )

    def run() -> list[torch.Tensor]:
        given = [t.cuda() for t in (x, w, b)]
        got = forward_backward(lambda x, w, b: layer_norm(x, w, b, EPS, zero_centered), given, dy.cuda())
        return [t.cpu() for t in got]

    got = run()
    with force("layer_norm", "reference"):
        plain = run()
    assert_not_worse(got, plain, exact, torch.finfo(dtype).eps / 2, NAMES)
    assert OPERATOR.unusable("cuda") == []
