"""The CPU attention kernel: errors that a wrong result does not pass, all threads at work, few sizes of product."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindspeed_lite.ops import attention as halves
from mindspeed_lite.ops.attention import attention, cpu, prepare
from mindspeed_lite.ops.attention import reference as definition
from tests.harness.compare import error
from tests.harness.errors import assert_within, bound, is_within, mutations
from tests.ops import attention_reference as reference
from tests.ops.attention import slack, term_sizes

_without_kernel = pytest.mark.skipif(cpu.unusable() is not None, reason=str(cpu.unusable()))

# sq, sk, b, n, g, d, dv and options.
CALLS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((1, 1, 1, 1, 1, 2, 2), {}),
    ((1, 257, 2, 4, 2, 16, 8), {}),
    ((7, 9, 1, 2, 1, 6, 10), {"causal": True}),
    ((129, 129, 1, 4, 1, 32, 32), {"causal": True}),
    ((200, 200, 2, 2, 2, 16, 24), {"causal": True, "window": (37, 0)}),
    ((150, 323, 1, 3, 1, 24, 16), {"causal": True}),
    ((323, 150, 1, 2, 2, 24, 16), {"window": (60, 33)}),
    ((193, 193, 1, 2, 1, 64, 64), {}),
    # Heads of several panels of columns and parts of one; a last tile of a few queries.
    ((144, 260, 1, 2, 1, 112, 80), {"causal": True, "window": (150, 0)}),
    ((70, 300, 1, 2, 2, 128, 160), {"window": (-1, 90)}),
]
NAMES = ("out", "dq", "dk", "dv")


def make(sizes: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    sq, sk, b, n, g, d, dv = sizes
    generator = torch.Generator().manual_seed(sq + sk)
    shapes = ((sq, b, n, d), (sk, b, g, d), (sk, b, g, dv), (sq, b, n, dv))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def run(function: Any, tensors: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    *inputs, dout = tensors
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = function(*leaves, **options)
    out.backward(dout.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def judge(tensors: list[torch.Tensor], **options: Any) -> None:
    """Results are within the bound, and none that is wrong in part."""
    dtype, length = tensors[0].dtype, max(tensors[0].shape[0], tensors[1].shape[0])
    exact = run(reference.attention, [t.double() for t in tensors], **options)
    got = run(attention, tensors, **options)
    # Probabilities, the output within the softmax's derivative, that derivative and the result are rounded.
    allowed = bound(dtype, length * (tensors[0].shape[2] // tensors[1].shape[2]) + tensors[0].shape[3], 4)
    generator = torch.Generator().manual_seed(0)
    for name, mine, true in zip(NAMES, got, exact, strict=True):
        # With one key the softmax is constant: its derivative is a difference of equal numbers.
        magnitude = float(tensors[3].double().norm()) if float(true.norm()) < 1e-9 else None
        assert_within(mine, true, allowed, magnitude, name)
        # 1 % is less than a bf16 number's last place: only many numbers show it.
        if magnitude is None and mine.numel() >= 64:
            for kind, wrong in mutations(mine, generator):
                assert not is_within(wrong, true, allowed), (name, kind)


@_without_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("sizes", "options"), CALLS)
def test_results_are_exact_and_wrong_ones_are_not(
    sizes: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype
) -> None:
    judge(make(sizes, dtype), **options)


@_without_kernel
@pytest.mark.parametrize("sizes", [(140, 140, 1, 4, 2, 16, 16), (70, 70, 2, 2, 1, 7, 5)], ids=["pairs", "as fp32"])
def test_sums_that_are_not_rounded(sizes: tuple[int, ...]) -> None:
    """Rounded, they are the other results bit by bit; PyTorch's kernel and the definition give fp32 ones too."""
    q, k, v, dout = make(sizes, torch.bfloat16)
    spec = prepare(q, k, v, causal=True)
    out, lse = cpu.forward(q, k, v, spec)
    gradients = cpu.backward(dout, q, k, v, out, lse, spec)
    got, logs = halves.forward(q, k, v, spec)
    results = (got, *halves.backward(dout, q, k, v, out, lse, spec))
    assert torch.equal(logs, lse)
    for wide, rounded in zip(results, (out, *gradients), strict=True):
        assert wide.dtype == torch.float32 and torch.equal(wide.bfloat16(), rounded)
        assert not torch.equal(wide, rounded.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["ours", "PyTorch's", "definition"])
def test_sums_of_every_kernel_are_more_exact_than_rounded_ones(
    dtype: torch.dtype, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, dout = make((140, 140, 1, 4, 2, 16, 16), dtype)
    exact = run(reference.attention, [t.double() for t in (q, k, v, dout)], causal=True)
    if kernel == "PyTorch's":
        monkeypatch.setattr(cpu, "_in_kernel", lambda q, spec: False)
    elif kernel == "definition":
        monkeypatch.setattr(halves, "module", lambda spec: definition)
    spec = prepare(q, k, v, causal=True)
    out, lse = halves.forward(q, k, v, spec)
    results = (out, *halves.backward(dout, q, k, v, out.to(dtype), lse, spec))
    for wide, truth in zip(results, exact, strict=True):
        assert wide.dtype == torch.float32 and error(wide, truth) < error(wide.to(dtype), truth)


@_without_kernel
def test_heads_of_odd_size_in_bf16() -> None:
    judge(make((70, 70, 1, 2, 1, 7, 5), torch.bfloat16), causal=True)


@_without_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_and_a_sink(dtype: torch.dtype) -> None:
    tensors = make((140, 170, 2, 4, 2, 16, 16), dtype)
    mask = torch.rand(2, 1, 140, 170, generator=torch.Generator().manual_seed(1)) < 0.4
    judge(tensors, mask=mask)
    judge(tensors, mask=mask, causal=True, sink=torch.linspace(-2.0, 2.0, 4).to(dtype))


@_without_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_that_grow_and_fall_along_the_keys(dtype: torch.dtype) -> None:
    # The largest score so far is exceeded many times, within a tile too, by more than a sum's range.
    q, k, v, dout = make((150, 300, 1, 2, 1, 16, 16), dtype)
    heights = torch.cat([torch.linspace(0.0, 12.0, 200), torch.linspace(12.0, -12.0, 100)])
    k = (k.float() * 0.1 + heights.reshape(-1, 1, 1, 1)).to(dtype)
    q = (q.float() * 0.1 + torch.linspace(-3.0, 3.0, 150).reshape(-1, 1, 1, 1)).to(dtype)
    tensors = [q, k, v, dout]
    got, exact = run(attention, tensors), run(reference.attention, [t.double() for t in tensors])
    # Scores and the logarithm of their sum are rounded, and are large here.
    allowed = bound(dtype, 600, 4) + 2 * slack(q, k, None, 0.25)
    for name, mine, true, size in zip(NAMES, got, exact, term_sizes((q, k, v), dout, {}), strict=True):
        assert_within(mine, true, allowed, size, name)


@_without_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_passes_drop_the_same(dtype: torch.dtype) -> None:
    # With v and dout the identity the output is the matrix of probabilities, and dv its transpose.
    s = 176
    q, k, _, _ = make((s, s, 1, 1, 1, 16, 16), dtype)
    eye = torch.eye(s).reshape(s, 1, 1, s).to(dtype)
    torch.manual_seed(4)
    out, _, _, dv = run(attention, [q, k, eye, eye], dropout_p=0.3)
    plain = attention(q, k, eye).reshape(s, s)
    dropped = out.reshape(s, s) == 0
    assert abs(float(dropped.float().mean()) - 0.3) < 0.015
    assert_within(out.reshape(s, s), plain.double().masked_fill(dropped, 0.0) / 0.7, bound(dtype, s, 4))
    assert_within(dv.reshape(s, s), out.reshape(s, s).T.double(), bound(dtype, s, 2))
