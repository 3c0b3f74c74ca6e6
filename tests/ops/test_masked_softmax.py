"""masked_softmax: its definition, Megatron's own path, and the CPU kernel against both in float64."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable

import pytest
import torch

from mindspeed_lite.ops.dispatch import force
from mindspeed_lite.ops.masked_softmax import cpu, masked_softmax, reference, why_not
from tests.harness.compare import Sizes, forward_backward

from . import twin

DTYPES = [torch.bfloat16, torch.float32]
PATHS = {"cpu": cpu.masked_softmax, "reference": reference.masked_softmax}
compiled = pytest.mark.skipif(cpu.LIBRARY.unusable() is not None, reason=str(cpu.LIBRARY.unusable()))
if cpu.LIBRARY.unusable() is not None:
    del PATHS["cpu"]

Path = Callable[[torch.Tensor, torch.Tensor | None, bool, float], torch.Tensor]


def hidden(scores: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    """Where something is hidden, [b, n, sq, sk]."""
    found = torch.zeros(scores.shape, dtype=torch.bool) if mask is None else mask.expand(scores.shape).clone()
    if causal and scores.shape[-2] > 1:
        found |= torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return found


def make(
    shape: tuple[int, ...], dtype: torch.dtype, kind: str = "none", seed: int = 0, size: float = 2.0
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Scores, a mask that hides about a quarter and some rows whole, and a gradient of the probabilities."""
    generator = torch.Generator().manual_seed(seed)
    b, n, q, k = shape
    scores = (size * torch.randn(shape, generator=generator)).to(dtype)
    dprobs = torch.randn(shape, generator=generator).to(dtype)
    sizes = {
        "bnqk": shape, "b1qk": (b, 1, q, k), "11qk": (1, 1, q, k), "b11k": (b, 1, 1, k), "qk": (q, k), "k": (k,),
        "bnq1": (b, n, q, 1), "1": (), "expanded": (b, 1, q, 1),
    }  # fmt: skip
    if kind == "none":
        return scores, None, dprobs
    mask = torch.rand(sizes[kind], generator=generator) < 0.25
    if kind in ("bnqk", "b1qk", "11qk", "qk"):
        mask[..., q // 2 : q // 2 + 1, :] = True
    return scores, mask.expand(shape) if kind == "expanded" else mask, dprobs


def both(path: Path, given: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor], causal: bool, scale: float = 1.0):  # type: ignore[no-untyped-def]
    scores, mask, dprobs = given
    return forward_backward(lambda x: path(x, mask, causal, scale), [scores], dprobs)


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


@pytest.mark.parametrize("path", PATHS)
def test_a_row_without_visible_keys_is_uniform(path: str) -> None:
    scores, _, dprobs = make((1, 2, 5, 5), torch.float32)
    probs, dscores = both(PATHS[path], (scores, torch.tensor(True), dprobs), True)
    torch.testing.assert_close(probs, torch.full_like(probs, 0.2))
    assert not dscores.any()


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


# NPU, on the emulation of its documentation (see twin)


def test_masks_that_are_not_given_are_made_once_and_few_are_kept(npu_twin: list[twin.Call]) -> None:
    scores = torch.zeros(2, 3, 32, 32)
    with force("masked_softmax", "npu"):
        for _ in range(3):
            masked_softmax(scores, causal=True)
            masked_softmax(scores)
            masked_softmax(torch.zeros(2, 3, 64, 64), causal=True)
        masks = [call.args[1] for call in npu_twin]
        assert masks[0].shape == (1, 1, 32, 32) and masks[0].sum() == 32 * 31 // 2 and not masks[1].any()
        assert len({mask.data_ptr() for mask in masks}) == 3, "whatever comes between"
        for size in range(96, 1024, 32):
            masked_softmax(torch.zeros(1, 1, size, size), causal=True)
    kept = sys.modules["mindspeed_lite.ops.masked_softmax.npu"]._masks
    assert len(kept) == 4
