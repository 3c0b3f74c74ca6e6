"""masked_softmax: its definition, Megatron's own path, and the CPU kernel against both in float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from mindspeed_lite.bench import operators
from mindspeed_lite.ops import native
from mindspeed_lite.ops.masked_softmax import OPERATOR, Case, cpu, masked_softmax, reference, why_not
from tests.harness.compare import Sizes, assert_not_worse, forward_backward, one_thread
from tests.harness.errors import assert_within, bound
from tests.harness.masked_softmax import DTYPES, MASKS, SLACK, hidden, make, megatron

NAMES = ("probs", "dscores")
PATHS = {"cpu": cpu.masked_softmax, "reference": reference.masked_softmax}
compiled = pytest.mark.skipif(cpu.library.unusable() is not None, reason=str(cpu.library.unusable()))
if cpu.library.unusable() is not None:
    del PATHS["cpu"]

Path = Callable[[torch.Tensor, torch.Tensor | None, bool, float], torch.Tensor]


def both(path: Path, given: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor], causal: bool, scale: float = 1.0):  # type: ignore[no-untyped-def]
    scores, mask, dprobs = given
    return forward_backward(lambda x: path(x, mask, causal, scale), [scores], dprobs)


def truth(given: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor], causal: bool, scale: float = 1.0):  # type: ignore[no-untyped-def]
    scores, mask, dprobs = given
    return forward_backward(lambda x: megatron(x, mask, causal, scale), [scores], dprobs, torch.float64)


@pytest.mark.parametrize("path", PATHS)
def test_the_definition_is_the_formula(path: str) -> None:
    scores = torch.tensor([[0.0, math.log(2.0), math.log(5.0)]] * 3)[None, None].requires_grad_()
    mask = torch.tensor([[False] * 3, [False] * 3, [False, True, False]])
    probs = PATHS[path](scores, mask, True, 1.0)
    expected = torch.tensor([[1.0, 0.0, 0.0], [1 / 3, 2 / 3, 0.0], [1 / 6, 0.0, 5 / 6]])
    torch.testing.assert_close(probs.detach()[0, 0], expected)
    probs.backward(torch.tensor([[4.0, 7.0, 7.0], [3.0, 6.0, 7.0], [6.0, 7.0, 12.0]])[None, None])
    # p (dp - sum p dp): the sums are 4, 5 and 11.
    gradient = torch.tensor([[0.0, 0.0, 0.0], [-2 / 3, 2 / 3, 0.0], [-5 / 6, 0.0, 5 / 6]])
    assert scores.grad is not None
    torch.testing.assert_close(scores.grad[0, 0], gradient)
    scaled = PATHS[path](scores.detach(), None, False, 2.0)
    torch.testing.assert_close(scaled[0, 0], torch.tensor([[1 / 30, 4 / 30, 25 / 30]] * 3))


def test_megatrons_class_computes_the_same() -> None:
    softmax = pytest.importorskip("megatron.core.fusions.fused_softmax")
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.utils import attention_mask_func

    scores, mask, dprobs = make((2, 3, 7, 9), torch.bfloat16, "b1qk")
    module = softmax.FusedScaleMaskSoftmax(
        False, True, AttnMaskType.padding, False, attention_mask_func, True, 0.5, None
    )
    theirs = forward_backward(lambda x: module(x, mask), [scores], dprobs)
    for path in (megatron, reference.masked_softmax):
        for a, b in zip(both(path, (scores, mask, dprobs), False, 0.5), theirs, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_error_is_not_above_that_of_megatron(path: str, dtype: torch.dtype, kind: str, causal: bool) -> None:
    for shape, scale, size in (
        ((2, 3, 65, 65), 1.0, 2.0),
        ((1, 2, 130, 130), 0.125, 30.0),
        ((2, 2, 33, 33), -3.0, 9.0),
    ):
        given = make(shape, dtype, kind, size=size)
        exact = truth(given, causal, scale)
        assert_not_worse(
            both(PATHS[path], given, causal, scale), both(megatron, given, causal, scale), exact, SLACK, NAMES
        )


@settings(max_examples=150)
@given(
    batch=st.integers(0, 3),
    heads=st.integers(1, 3),
    queries=st.integers(0, 40),
    keys=st.integers(0, 70),
    causal=st.booleans(),
    kind=st.sampled_from(MASKS),
    dtype=st.sampled_from([*DTYPES, torch.float64]),
    scale=st.sampled_from([1.0, 0.125, -1.0, 0.0, 7.0]),
    size=st.sampled_from([0.01, 2.0, 60.0, 1e4]),
    path=st.sampled_from(sorted(PATHS)),
    seed=st.integers(0, 1000),
)
def test_every_path_agrees_with_the_definition(
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    causal: bool,
    kind: str,
    dtype: torch.dtype,
    scale: float,
    size: float,
    path: str,
    seed: int,
) -> None:
    if dtype == torch.float64:
        path = "reference"
    if causal and queries > 1:
        keys = queries
    scores, mask, dprobs = given = make((batch, heads, queries, keys), dtype, kind, seed, size)
    if dtype == torch.float16:
        scores.clamp_(-6e4, 6e4)
    with one_thread():
        exact, got = truth(given, causal, scale), both(PATHS[path], given, causal, scale)
    assert got[0].dtype == dtype and got[1].dtype == dtype
    assert got[0].shape == got[1].shape == scores.shape
    assert not got[1][hidden(scores, mask, causal)].any(), "a hidden score has a gradient"
    if not scores.numel():
        return
    eps, single = torch.finfo(dtype).eps, torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    # A scaled score is rounded once, and the exponential makes of that a part of each probability.
    part = single * (8 + 8 * abs(scale) * scores.double().abs().amax().item())
    smallest = torch.finfo(dtype).tiny * eps if dtype == torch.float16 else 1e-37
    assert ((got[0].double() - exact[0]).abs() <= exact[0] * (eps + part) + smallest).all()
    most = abs(scale) * dprobs.double().abs().amax().item()
    bound = exact[1].abs() * eps + most * 4 * part * exact[0] + smallest * (1 + most)
    assert ((got[1].double() - exact[1]).abs() <= bound).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["none", "11qk", "expanded"])
def test_gradcheck(kind: str, causal: bool) -> None:
    scores, mask, _ = make((2, 1, 4, 4), torch.float64, kind)
    scores.requires_grad_()
    with one_thread():
        assert gradcheck(lambda x: masked_softmax(x, mask, causal=causal, scale=0.7), [scores])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_extreme_values_are_those_of_torch(path: str, dtype: torch.dtype, causal: bool) -> None:
    big = 6e4 if dtype == torch.float16 else 3e38
    rows = [
        [1e4, -1e4, 0.0, 1e4],
        [-2e4, -2e4, -2e4, -2e4],  # below what is hidden
        [-9990.0, -9990.0, 1.0, 1.0],  # beside what is hidden, where 1.0 is hidden
        [big, -big, big, 0.0],
        [-math.inf, 1.0, 2.0, 0.0],
        [-math.inf, -math.inf, -math.inf, -math.inf],
        [math.inf, 0.0, 1.0, 2.0],
        [math.nan, 0.0, 1.0, 2.0],
        [0.0, 1.0, math.nan, math.inf],
    ]
    masks = [
        [False, False, True, True],
        [True, True, True, True],  # nothing is visible
        [True, False, False, False],
        [False, False, False, False],
    ]
    # Every row as every query of a causal square, under every mask.
    scores = torch.tensor(rows)[:, None, None].expand(-1, 4, 4, 4).contiguous().to(dtype)
    mask = torch.tensor(masks)[None, :, None]  # [1, 4, 1, 4]
    for scale in (1.0, 2.0):
        given = (scores, mask, torch.randn(scores.shape, generator=torch.Generator().manual_seed(3)).to(dtype))
        got, expected = both(PATHS[path], given, causal, scale), both(megatron, given, causal, scale)
        eps = torch.finfo(dtype).eps
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2 * eps, atol=4 * eps, equal_nan=True)
        assert not got[1][hidden(scores, mask, causal)].any()


@pytest.mark.parametrize("path", PATHS)
def test_a_row_without_visible_keys_is_uniform(path: str) -> None:
    scores, _, dprobs = make((1, 2, 5, 5), torch.float32)
    probs, dscores = both(PATHS[path], (scores, torch.tensor(True), dprobs), True)
    torch.testing.assert_close(probs, torch.full_like(probs, 0.2))
    assert not dscores.any()


@pytest.mark.parametrize("path", PATHS)
def test_every_fp16_is_read_and_small_ones_are_written(path: str) -> None:
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16)
    steps = torch.linspace(-18, 0, 1 << 16).half()  # down to less than the smallest subnormal
    for column in (every, steps):
        scores = torch.stack((column, torch.zeros_like(column)), -1)[None, None]
        dprobs = torch.tensor([6e4, -6e4]).half().expand_as(scores)
        for scale in (1.0, 8.0):  # whose gradients pass the largest number
            got, expected = (both(way, (scores, None, dprobs), False, scale) for way in (PATHS[path], megatron))
            for ours, theirs in zip(got, expected, strict=True):
                # A gradient is a difference of numbers of 6e4, in fp32.
                most = 6e-8 if ours is got[0] else 0.05 * scale
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=most, equal_nan=True)
            assert expected[1].isinf().any() == (scale == 8.0)
        # So much that the smallest numbers matter.
        ours, theirs = (way(scores, None, False, 1e6) for way in (PATHS[path], megatron))
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=6e-8, equal_nan=True)


@pytest.mark.parametrize("path", PATHS)
def test_strides(path: str) -> None:
    base, _, _ = make((4, 6, 10, 12), torch.float32)
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "transposed": lambda x: x.transpose(0, 1),
        "keys apart": lambda x: x.transpose(1, 3),
        "every other key": lambda x: x[..., ::2],
        "a part": lambda x: x[1:3, 2:, 3:8, 1:11],
        "expanded": lambda x: x[:1].expand(3, 6, 10, 12),
        "one row": lambda x: x[:1, :1, :1],
    }
    for name, view in views.items():
        shape = view(base).shape
        _, mask, dprobs = make(tuple(shape), torch.float32, "bnqk")
        assert mask is not None
        turned = mask.transpose(2, 3).contiguous().transpose(2, 3)  # its keys are apart
        for gradient in (
            dprobs,
            dprobs.transpose(0, 3).contiguous().transpose(0, 3),
            dprobs[:1, :1, :1].expand(shape),
        ):
            got = forward_backward(lambda x: PATHS[path](view(x), turned, False, 1.0), [base], gradient)  # noqa: B023
            exact = forward_backward(lambda x: megatron(view(x), mask, False, 1.0), [base], gradient, torch.float64)  # noqa: B023
            for ours, right in zip(got, exact, strict=True):
                assert_within(ours, right, bound(torch.float32, shape[-1], 4), name=name)


def test_a_single_query_sees_all_keys() -> None:
    scores, mask, dprobs = make((2, 3, 1, 17), torch.bfloat16, "b11k")
    for a, b in zip(
        forward_backward(functools.partial(masked_softmax, mask=mask, causal=True), [scores], dprobs),
        forward_backward(functools.partial(masked_softmax, mask=mask), [scores], dprobs),
        strict=True,
    ):
        assert torch.equal(a, b)


@compiled
def test_what_is_right_of_the_diagonal_is_not_read() -> None:
    scores, _, dprobs = make((2, 2, 37, 37), torch.bfloat16)
    right = hidden(scores, None, True)
    expected = both(cpu.masked_softmax, (scores, None, dprobs), True)
    got = both(
        cpu.masked_softmax, (scores.masked_fill(right, math.nan), None, dprobs.masked_fill(right, math.nan)), True
    )
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert not got[0][right].any() and not got[1][right].any()


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_fp32_copy_no_causal_matrix_and_little_kept(dtype: torch.dtype) -> None:
    scores, mask, dprobs = make((2, 4, 64, 64), dtype, "b1qk")
    scores.requires_grad_()
    for hides, causal in ((mask, False), (None, True), (mask, True)):
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # noqa: B023
            masked_softmax(scores, hides, causal=causal)
        assert kept[0].data_ptr() == scores.data_ptr()
        assert sum(t.numel() for t in kept[1:] if t.is_floating_point()) == 2 * scores[..., 0].numel()
        with Sizes() as sizes:
            torch.autograd.grad(masked_softmax(scores, hides, causal=causal), scores, dprobs)
        assert sizes.largest == scores.numel() * scores.element_size()
        if hides is None:
            wanted = ("aten.empty.", "aten.detach.", "aten.new_empty", "aten.view", "aten.alias")
            assert not [name for name in sizes.names if not name.startswith(wanted)], sizes.names
    with torch.no_grad(), Sizes() as sizes:
        masked_softmax(scores, causal=True)
    assert sizes.largest == scores.numel() * scores.element_size()


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_the_result_does_not_depend_on_the_number_of_threads(dtype: torch.dtype, causal: bool) -> None:
    given = make((2, 3, 101, 101), dtype, "b1qk")
    with one_thread():
        one = both(cpu.masked_softmax, given, causal)
        for threads in (2, 3):
            torch.set_num_threads(threads)
            many = both(cpu.masked_softmax, given, causal)
            assert all(torch.equal(a, b) for a, b in zip(one, many, strict=True))


@compiled
def test_scores_changed_between_the_passes_are_autograds_error() -> None:
    scores = make((1, 1, 4, 4), torch.float32)[0].requires_grad_() * 1
    probs = masked_softmax(scores, causal=True)
    with torch.no_grad():
        scores.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        probs.sum().backward()


@pytest.mark.filterwarnings("ignore")
def test_it_compiles() -> None:
    scores, mask, dprobs = given = make((2, 2, 9, 9), torch.float32, "b1qk")
    torch._dynamo.reset()
    run = torch.compile(lambda x: masked_softmax(x * 1.0, mask, causal=True, scale=0.5), backend="aot_eager")
    for ours, right in zip(forward_backward(run, [scores], dprobs), truth(given, True, 0.5), strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=1e-5, atol=1e-6)


def test_fake_tensors_have_the_shapes_of_real_ones() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    scores, mask, _ = make((2, 2, 9, 9), torch.bfloat16, "b1qk")
    assert mask is not None
    with FakeTensorMode() as mode:
        probs = masked_softmax(mode.from_tensor(scores), mode.from_tensor(mask), causal=True)
    assert probs.shape == scores.shape and probs.dtype == scores.dtype


def test_without_a_compiler_the_reference_serves_and_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "library", native.Library(cpu.library.source, cpu.library.functions))
    monkeypatch.setattr(cpu.library, "_state", "no C++ compiler")
    OPERATOR._chosen.clear()
    try:
        scores, mask, _ = make((1, 2, 3, 5), torch.bfloat16, "b1qk")
        assert why_not(scores, mask) == ["no C++ compiler"]
        assert OPERATOR.choose(Case("cpu", torch.bfloat16, False, False)) is reference.masked_softmax
        assert "float64" in why_not(scores.double())[0]
    finally:
        OPERATOR._chosen.clear()


def test_what_is_not_a_masked_softmax_is_one_clear_error() -> None:
    scores = torch.zeros(2, 3, 4, 5)
    with pytest.raises(ValueError, match=r"want scores \[b, n, sq, sk\], not \[3, 4, 5\]"):
        masked_softmax(scores[0])
    with pytest.raises(ValueError, match=r"scores are torch\.int64"):
        masked_softmax(scores.long())
    with pytest.raises(ValueError, match=r"as many queries as keys, or one, not 4 and 5"):
        masked_softmax(scores, causal=True)
    for scale in (math.inf, math.nan):
        with pytest.raises(ValueError, match=f"scale is {scale}"):
            masked_softmax(scores, scale=scale)
    with pytest.raises(ValueError, match=r"mask is torch\.float32"):
        masked_softmax(scores, torch.zeros(4, 5))
    with pytest.raises(ValueError, match="mask is on meta"):
        masked_softmax(scores, torch.zeros(4, 5, dtype=torch.bool, device="meta"))
    for shape in ((5, 4), (2, 2, 4, 5), (1, 1, 1, 4, 5), (4, 0)):
        with pytest.raises(ValueError, match="does not broadcast"):
            why_not(scores, torch.zeros(shape, dtype=torch.bool))


@pytest.mark.parametrize("text", ["1x2x16x16", "2x2x8x8,causal=0", "2x1x8x12,causal=0"])
def test_the_benchmark_races_the_same_thing(text: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        case = operators.case("masked_softmax", text, "cpu", dtype)
        ours, plain = (each.load()(*case.make()) for each in case.contenders[:2])
        assert_within(ours, plain.double(), bound(dtype, 16, 2))
    for wrong in ("1x2x3", "1x2x3x4", "1x2x4x4,causal=2"):
        with pytest.raises(ValueError):
            operators.case("masked_softmax", wrong, "cpu", torch.float32)
