"""rms_norm: its reference against the formula, and every other path against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.autograd import gradcheck

from mindspeed_lite.ops.dispatch import force
from mindspeed_lite.ops.rms_norm import OPERATOR, Case, cuda, reference, rms_norm
from mindspeed_lite.ops.rows import as_rows
from tests.harness.compare import assert_not_worse, error, forward_backward, one_thread
from tests.harness.errors import assert_within, bound
from tests.harness.reasons import why_not_of

why_not = why_not_of(rms_norm)

NAMES = ("y", "dx", "dw")
EPS = 1e-5

# fp32 results of both paths come from the same number of fp32 roundings in another order, in which half a
# unit in the last place either way is chance. A 16-bit result carries one rounding that dwarfs them.
SLACK = torch.finfo(torch.float32).eps / 2


def torch_rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, w.shape, w, EPS)


def make(
    shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype | None = None, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).to(dtype)
    w = (1 + 0.2 * torch.randn(shape[-1], generator=generator)).to(weight_dtype or dtype)
    return x, w, torch.randn(shape, generator=generator).to(dtype)


def test_reference_is_the_formula() -> None:
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    w = torch.tensor([2.0, -1.0], dtype=torch.float64)
    rms = (12.5 + 0.5) ** 0.5
    torch.testing.assert_close(reference.rms_norm(x, w, 0.5), torch.tensor([[6 / rms, -4 / rms]], dtype=torch.float64))
    torch.testing.assert_close(
        reference.rms_norm(x, w, 0.5, zero_centered=True), torch.tensor([[9 / rms, 0.0]], dtype=torch.float64)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(512, 256), (64, 2048), (3, 5, 7, 33), (1, 1), (129, 1000)])
def test_error_is_not_above_that_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, w, dy = make(shape, dtype)
    exact = forward_backward(reference.rms_norm, (x, w), dy, torch.float64)
    replaced = forward_backward(torch_rms_norm, (x, w), dy)
    got = forward_backward(rms_norm, (x, w), dy)
    if shape == (1, 1):  # y = sign(x) w: the gradient of x is rounding noise around 0
        got, replaced, exact = ([part[0], part[2]] for part in (got, replaced, exact))
        assert_not_worse(got, replaced, exact, SLACK, ("y", "dw"))
    else:
        assert_not_worse(got, replaced, exact, SLACK, NAMES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_error_is_not_above_that_of_torch_at_full_size(dtype: torch.dtype) -> None:
    x, w, dy = make((1024, 1024), dtype)
    exact = forward_backward(reference.rms_norm, (x, w), dy, torch.float64)
    assert_not_worse(
        forward_backward(rms_norm, (x, w), dy),
        forward_backward(torch_rms_norm, (x, w), dy),
        exact,
        SLACK,
        NAMES,
    )


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(1, 6), max_size=3).flatmap(
        lambda head: st.integers(1, 70).map(lambda width: (*head, width))
    ),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    weight_dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    zero_centered=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_way_agrees_with_the_reference(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    zero_centered: bool,
    seed: int,
) -> None:
    x, w, dy = make(shape, dtype, weight_dtype, seed)

    def run(function, precise: torch.dtype | None):  # type: ignore[no-untyped-def]
        return forward_backward(lambda x, w: function(x, w, EPS, zero_centered), (x, w), dy, precise)

    with one_thread():
        exact = run(reference.rms_norm, torch.float64)
    with one_thread():
        got = run(rms_norm, None)
    # One rounding to the dtype of the result, above the fp32 roundings of sums of up to 70 * 216 terms. dx is
    # a difference of two terms, so its error is measured against the larger: dy * w * rstd.
    rstd = 1 / (x.double().pow(2).mean(-1, keepdim=True) + EPS).sqrt()
    size = (dy.double() * (w.double() + (1 if zero_centered else 0)) * rstd).norm().item()
    for name, ours, truth, into in zip(NAMES, got, exact, (dtype, dtype, weight_dtype), strict=True):
        assert ours.dtype == into
        # Sums in fp32 make no more exact a gradient of a weight in float64.
        rounded_to = torch.float32 if into == torch.float64 and dtype != torch.float64 else into
        allowed = bound(rounded_to, 144)
        assert_within(ours, truth, allowed, size if name == "dx" else None, name)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_gradcheck(zero_centered: bool) -> None:
    x = torch.randn(2, 3, 34, dtype=torch.float64, requires_grad=True)
    w = torch.randn(34, dtype=torch.float64, requires_grad=True)
    with one_thread():
        assert gradcheck(lambda x, w: rms_norm(x, w, EPS, zero_centered), (x, w))


@pytest.mark.parametrize("which", [(True, False), (False, True)])
def test_only_the_wanted_gradient_is_made(which: tuple[bool, bool]) -> None:
    x, w, dy = make((6, 40), torch.float32)
    both = forward_backward(rms_norm, (x, w), dy)
    x, w = x.requires_grad_(which[0]), w.requires_grad_(which[1])
    rms_norm(x, w).backward(dy)
    for leaf, wanted, full in zip((x, w), which, both[1:], strict=True):
        if wanted:
            assert leaf.grad is not None and torch.equal(leaf.grad, full)
        else:
            assert leaf.grad is None


def test_strides_do_not_matter() -> None:
    x, w, dy = make((12, 10, 24), torch.float32)
    plain = forward_backward(rms_norm, (x, w), dy)
    views = {
        "transposed": x.transpose(0, 1).contiguous().transpose(0, 1),
        "slice of a wider tensor": torch.cat([x, x], -1)[..., :24],
        "last dimension strided": torch.stack([x, x], -1)[..., 0],
    }
    for name, view in views.items():
        assert not view.is_contiguous() and torch.equal(view, x), name
        leaf = view.detach().requires_grad_()
        w_leaf = w.clone().requires_grad_()
        y = rms_norm(leaf, w_leaf)
        y.backward(dy.transpose(0, 1).contiguous().transpose(0, 1))
        assert y.is_contiguous()
        assert leaf.grad is not None and w_leaf.grad is not None
        for got, want in zip((y, leaf.grad, w_leaf.grad), plain, strict=True):
            assert torch.equal(got, want), name


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (8,)])
def test_empty_and_one_dimensional_inputs(shape: tuple[int, ...]) -> None:
    x, w, dy = make(shape, torch.bfloat16)
    y, dx, dw = forward_backward(rms_norm, (x, w), dy)
    assert y.shape == dx.shape == shape and dw.shape == (8,)
    if 0 in shape:
        assert not dw.any()


def test_without_gradients_nothing_is_recorded() -> None:
    x, w, _ = make((5, 8), torch.float32)
    w.requires_grad_()
    with torch.no_grad():
        quiet = rms_norm(x, w)
    assert not quiet.requires_grad
    with torch.inference_mode():
        assert torch.equal(rms_norm(x, w), quiet)
    assert torch.equal(rms_norm(x, w), quiet)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_backward_keeps_x_weight_and_one_number_per_row(dtype: torch.dtype) -> None:
    x, w, _ = make((1024, 256), dtype)
    x.requires_grad_()
    w.requires_grad_()
    saved: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        rms_norm(x, w)
    kept = [t for t in saved if t.data_ptr() not in (x.data_ptr(), w.data_ptr())]
    assert [(t.numel(), t.dtype) for t in kept] == [(1024, torch.float32)]


def test_a_changed_input_is_noticed() -> None:
    x, w, dy = make((1024, 256), torch.float32)
    w.requires_grad_()
    y = rms_norm(x, w)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_weight_in_fp32_is_not_rounded_to_bf16() -> None:
    x, w, dy = make((64, 128), torch.bfloat16, torch.float32)
    exact = forward_backward(reference.rms_norm, (x, w), dy, torch.float64)
    y, dx, dw = forward_backward(rms_norm, (x, w), dy)
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert error(dw, exact[2]) < 1e-6
    assert torch.equal(y, exact[0].to(torch.bfloat16)) or error(y, exact[0]) <= 2**-8 / 3


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore")
def test_compiles(backend: str) -> None:
    x, w, dy = make((1024, 256), torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: rms_norm(x * 1.0, w), backend=backend)
    exact = forward_backward(reference.rms_norm, (x, w), dy, torch.float64)
    got = forward_backward(compiled, (x, w), dy)
    for name, ours, truth in zip(NAMES, got, exact, strict=True):
        assert error(ours, truth) < 1e-6, name


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="rms_norm"):
        rms_norm(torch.zeros(2, 8), torch.zeros(4))
    with pytest.raises(ValueError, match="rms_norm"):
        rms_norm(torch.zeros(2, 8), torch.zeros(2, 8))


def test_integers_fall_back_with_a_reason() -> None:
    x = torch.zeros(2, 8, dtype=torch.int32)
    assert why_not(x, torch.ones(8)) == ["dtype torch.int32"]
    assert why_not(x.float(), torch.ones(8)) == []


def test_heads_cut_out_of_a_projection_are_taken_as_they_lie() -> None:
    s, b, n, d = 12, 2, 4, 16
    mixed = torch.randn(s, b, n, 3 * d)
    w, dy = torch.rand(d), torch.randn(s, b, n, d)
    for start in (0, d):
        heads = mixed[..., start : start + d]
        rows, distance = as_rows(heads)
        assert rows.data_ptr() == heads.data_ptr() and distance == 3 * d
        for got, want in zip(
            forward_backward(lambda x, w: rms_norm(x, w, EPS), (heads, w), dy),
            forward_backward(lambda x, w: rms_norm(x, w, EPS), (heads.contiguous(), w), dy),
            strict=True,
        ):
            assert torch.equal(got, want)
    irregular = mixed.transpose(0, 1)[..., :d]
    assert as_rows(irregular)[0].is_contiguous() and as_rows(irregular)[1] == d


def test_the_kernel_gives_the_same_bits_again_and_adds_long_sums_well() -> None:
    x, w, dy = make((16411, 24), torch.bfloat16, torch.float32)
    first, again = (forward_backward(rms_norm, (x, w), dy) for _ in range(2))
    exact = forward_backward(reference.rms_norm, (x, w), dy, torch.float64)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert error(first[2], exact[2]) < 1e-6


def test_a_row_that_is_not_finite_stays_alone() -> None:
    x, w, dy = make((9, 40), torch.float32)
    want = forward_backward(rms_norm, (x, w), dy)
    x[3, 5], x[6, 0] = float("nan"), float("inf")
    got = forward_backward(rms_norm, (x, w), dy)
    others = [0, 1, 2, 4, 5, 7, 8]
    assert torch.equal(got[0][others], want[0][others]) and torch.equal(got[1][others], want[1][others])
    assert got[0][3].isnan().all() and got[2].isnan().all()


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e15])
def test_extreme_rows(size: float) -> None:
    x, w, dy = make((5, 64), torch.bfloat16)
    x = x * size
    exact = forward_backward(reference.rms_norm, (x, w), dy, torch.float64)
    for got, truth in zip(forward_backward(rms_norm, (x, w), dy)[:2], exact, strict=False):
        assert got.isfinite().all() and error(got, truth) <= 2**-8


def test_fake_tensors_have_a_result() -> None:
    with FakeTensorMode():
        x = torch.empty(4, 8, dtype=torch.bfloat16, requires_grad=True)
        y = rms_norm(x, torch.empty(8))
        y.backward(torch.empty(4, 8, dtype=torch.bfloat16))
        assert (y.shape, y.dtype, x.grad.shape) == ((4, 8), torch.bfloat16, (4, 8))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (dict(dtype=torch.float64, weight_dtype=torch.float32, zero_centered=False), "one dtype"),
        (dict(dtype=torch.int32, weight_dtype=torch.int32, zero_centered=False), "dtype torch.int32"),
    ],
)
def test_cuda_says_what_it_does_not_take(case: dict[str, object], words: str) -> None:
    assert any(words in reason for reason in cuda.supported(Case("cuda", **case)))  # type: ignore[arg-type]
    assert cuda.supported(Case("cuda", torch.bfloat16, torch.float32, True)) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(129, 1000), (3000, 64)])
def test_cuda(shape: tuple[int, ...], dtype: torch.dtype, zero_centered: bool) -> None:
    x, w, dy = make(shape, dtype)
    exact = forward_backward(lambda x, w: reference.rms_norm(x, w, EPS, zero_centered), (x, w), dy, torch.float64)

    def run() -> list[torch.Tensor]:
        on_device = (x.cuda(), w.cuda())
        got = forward_backward(lambda x, w: rms_norm(x, w, EPS, zero_centered), on_device, dy.cuda())
        return [t.cpu() for t in got]

    got = run()
    with force("rms_norm", "reference"):
        plain = run()
    assert_not_worse(got, plain, exact, torch.finfo(dtype).eps / 2, NAMES)
    assert OPERATOR.unusable("cuda") == []
