"""The attention kernel of our own on the CPU: what PyTorch's kernel is not asked for, and the way without it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch

from mindspeed_lite.ops.attention import attention, cpu
from tests.harness import attention_reference as reference
from tests.harness.attention import assert_right
from tests.harness.attention_reference import backward_half as backward
from tests.harness.attention_reference import forward_half as forward
from tests.harness.errors import assert_within, bound

pytestmark = pytest.mark.skipif(cpu.unusable() is not None, reason=str(cpu.unusable()))

# Around the size of a tile, in both directions.
LENGTHS = [(1, 1), (1, 127), (128, 128), (129, 130), (257, 300)]


def tensors(sq, sk, b=2, n=4, g=2, d=32, dv=24, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sq * 1000 + sk)
    shapes = ((sq, b, n, d), (sk, b, g, d), (sk, b, g, dv), (sq, b, n, dv))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def truth(q, k, v, dout, **how):
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    out = reference.attention(*leaves, **how)
    out.backward(dout.double())
    return [out.detach(), *(t.grad for t in leaves)]


def ours(q, k, v, dout, **how):
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = attention(*leaves, **how)
    out.backward(dout)
    return [out.detach(), *(t.grad for t in leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("sq", "sk"), LENGTHS)
def test_tiles_and_their_ends(sq, sk, dtype):
    q, k, v, dout = tensors(sq, sk, dtype=dtype)
    for how in ({}, {"causal": True}, {"window": (40, 0)}, {"window": (130, 7)}):
        assert_right(ours(q, k, v, dout, **how), truth(q, k, v, dout, **how), (q, k, v), dout, how)


@pytest.mark.parametrize("shape", [(2, 4, 70, 140), (2, 1, 70, 140), (1, 1, 1, 140), (4, 70, 140), (70, 140), (140,)])
def test_masks_of_every_shape_are_read_where_they_lie(shape):
    q, k, v, dout = tensors(70, 140)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[..., 5] = False
    for how in ({"mask": mask}, {"mask": mask, "causal": True}):
        assert_right(ours(q, k, v, dout, **how), truth(q, k, v, dout, **how), (q, k, v), dout, how)


def test_a_query_without_keys_gives_zero_and_no_gradient():
    q, k, v, dout = tensors(130, 130)
    mask = torch.zeros(130, 130, dtype=torch.bool)
    mask[3] = mask[129] = True
    out, dq, dk, dv = ours(q, k, v, dout, mask=mask)
    assert not out[[3, 129]].any() and not dq[[3, 129]].any()
    assert all(t.isfinite().all() for t in (out, dq, dk, dv))
    _, lse = forward(q, k, v, mask=mask)
    assert torch.isneginf(lse[..., [3, 129]]).all() and lse[..., :3].isfinite().all()


def test_extreme_scores_stay_exact_and_a_nan_shows():
    q, k, v, dout = tensors(40, 40)
    for scale in (1e4, 1e30):
        out, _, _, dv = ours(q, k, v, dout, causal=True, scale=scale)
        exact = truth(q, k, v, dout, causal=True, scale=scale)
        # One key has all of the weight.
        assert_within(out, exact[0], bound(out.dtype, 40))
        assert_within(dv, exact[3], bound(dv.dtype, 40))
    v[7] = torch.nan
    out = attention(q, k, v, causal=True)
    assert out[7:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_halves_over_parts_of_the_keys_make_the_whole(dtype):
    q, k, v, dout = tensors(50, 200, dtype=dtype)
    whole, lse = forward(q, k, v)
    parts = [slice(0, 90), slice(90, 200)]
    pieces = [forward(q, k[part], v[part]) for part in parts]
    assert_within(torch.logaddexp(pieces[0][1], pieces[1][1]), lse, bound(lse.dtype, 200, 4))
    dq = torch.zeros_like(q, dtype=torch.float32)
    expected = backward(dout, q, k, v, whole, lse)
    for part in parts:
        gradients = backward(dout, q, k[part], v[part], whole, lse)
        dq += gradients[0].float()
        for own, all_of_it in zip(gradients[1:], expected[1:], strict=True):
            assert_within(own, all_of_it[part], bound(dtype, 200, 2))
    assert_within(dq, expected[0], bound(dtype, 200, 3))


def test_dropout_drops_the_share_asked_for_the_same_way_in_both_passes():
    # With v the identity the output is the matrix of probabilities, and dv its transpose's product.
    s, p = 96, 0.25
    q, k, _, _ = tensors(s, s, b=1, n=1, g=1)
    v = torch.eye(s).reshape(s, 1, 1, s).requires_grad_()
    plain = attention(q, k, v.detach()).reshape(s, s)
    torch.manual_seed(5)
    out = attention(q, k, v, dropout_p=p)
    probabilities = out.detach().reshape(s, s)
    kept = probabilities != 0
    # 9,216 draws: the share of those dropped has a standard deviation of 0.0045.
    assert abs(float((~kept).float().mean()) - p) < 0.02
    assert_within(probabilities[kept], plain[kept] / (1 - p), bound(plain.dtype, s, 2))
    # No row or column is dropped together.
    assert float(kept.float().mean(0).std()) < 0.1 and float(kept.float().mean(1).std()) < 0.1

    out.backward(torch.eye(s).reshape(s, 1, 1, s))
    assert_within(v.grad.reshape(s, s), probabilities.T, bound(plain.dtype, s, 2))

    torch.manual_seed(5)
    assert torch.equal(attention(q, k, v.detach(), dropout_p=p), out.detach())
    assert not torch.equal(attention(q, k, v.detach(), dropout_p=p), out.detach())


def test_the_gradient_through_dropout_is_that_of_the_dropped_softmax():
    s, p = 40, 0.5
    q, k, v, dout = tensors(s, s, b=1, n=2, g=2, d=8, dv=s)
    eye = torch.eye(s).reshape(s, 1, 1, s).expand(s, 1, 2, s).contiguous()
    torch.manual_seed(3)
    factor = (attention(q, k, eye, dropout_p=p) != 0).double() / (1 - p)  # [s, 1, n, s]
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    weights = torch.einsum("sbnd,tbnd->sbnt", leaves[0] * 8**-0.5, leaves[1]).softmax(-1) * factor
    exact = torch.einsum("sbnt,tbnd->sbnd", weights, leaves[2])
    exact.backward(dout.double())
    torch.manual_seed(3)
    got = ours(q, k, v, dout, dropout_p=p)
    for mine, true in zip(got, [exact.detach(), *(t.grad for t in leaves)], strict=True):
        assert_within(mine, true, bound(torch.float32, 8 * s, 4))


def test_results_do_not_depend_on_threads_or_on_the_call():
    q, k, v, dout = tensors(300, 300, b=1, n=3, g=3, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            results.append(ours(q, k, v, dout, causal=True))
    finally:
        torch.set_num_threads(before)
    for first, second in itertools.pairwise(results):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_without_a_compiler_pytorchs_kernel_serves_and_says_why(tmp_path):
    code = (
        "import logging, torch; logging.basicConfig()\n"
        "from mindspeed_lite.ops.attention import attention\n"
        "for _ in range(2): attention(*torch.randn(3, 9, 1, 2, 8), causal=True)\n"
    )
    environment = {**os.environ, "CXX": "no-such-compiler", "MINDSPEED_LITE_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert "falls back to PyTorch, a block of rows at a time" in line and "CXX names no-such-compiler" in line
