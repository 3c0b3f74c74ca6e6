"""attention's dropout where no kernel has it: the distribution, the same scores dropped again, and no S x S kept."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

from mindspeed_lite.ops.attention import attention, blocked
from tests.harness.compare import Sizes, forward_backward, one_thread
from tests.harness.reasons import why_not_of
from tests.ops.attention import make

why_not = why_not_of(attention)


def dropped_weights(p: float, seed: int = 3, **options: object) -> torch.Tensor:
    """[b, n, sq, sk]: what dropout made of each weight, read off values that are rows of the identity."""
    s, b, n = 40, 2, 4
    (q, k, _), _ = make(s, s, b, n, n, 8, 8)
    values = torch.eye(s).reshape(s, 1, 1, s).expand(s, b, n, s)
    torch.manual_seed(seed)
    return attention(q, k, values, dropout_p=p, **options).permute(1, 2, 0, 3)


@pytest.mark.parametrize("p", [0.1, 0.5, 1e-7, 1 - 1e-7])
def test_weights_are_dropped_or_scaled_up(p: float) -> None:
    whole, dropped = dropped_weights(0.0), dropped_weights(p)
    kept = dropped != 0
    count = kept.numel()
    # The probability is a multiple of 2^-16 and never 0 or 1; four standard deviations of the number kept.
    quantised = min(max(round(p * 65536), 1), 65535) / 65536
    deviation = (count * quantised * (1 - quantised)) ** 0.5
    assert abs(kept.sum().item() - count * (1 - quantised)) <= 4 * deviation + 1
    # Without AVX-512 the two are different kernels, and PyTorch's takes its exponentials to 2^-16 or so.
    torch.testing.assert_close(dropped[kept], (whole / (1 - quantised))[kept], rtol=5e-5, atol=1e-7)


def test_heads_rows_and_calls_drop_differently() -> None:
    kept = dropped_weights(0.5) != 0
    flat = kept.flatten(0, 1).flatten(1).float()  # [batch and head, scores]
    # Of two independent fair masks of 1600 scores, half agree: within six standard deviations.
    for one in range(len(flat)):
        for other in range(one):
            assert abs((flat[one] == flat[other]).float().mean() - 0.5) < 6 * 0.5 / 40
    assert torch.equal(dropped_weights(0.5), dropped_weights(0.5))
    torch.manual_seed(0)
    (q, k, v), _ = make(16, 16, 1, 2, 2, 8, 8)
    assert not torch.equal(attention(q, k, v, dropout_p=0.5), attention(q, k, v, dropout_p=0.5))


@pytest.mark.parametrize("blocks", [1 << 20, 60], ids=["one block", "many blocks"])
@pytest.mark.parametrize("name", ["causal", "mask", "window", "grouped", "sink"])
def test_gradcheck(name: str, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds only if the backward pass drops what the forward pass dropped."""
    monkeypatch.setattr(blocked, "_SCORES", blocks)
    monkeypatch.setattr(blocked, "_BAND_ROWS", 3)
    inputs, _ = make(6, 7, 2, 4, 2 if name == "grouped" else 4, 3, 2, dtype=torch.float64)
    options: dict[str, object] = {
        "causal": dict(causal=True),
        "mask": dict(mask=torch.rand(2, 1, 6, 7, generator=torch.Generator().manual_seed(0)) > 0.6),
        "window": dict(window=(2, 1)),
        "grouped": dict(causal=True),
        "sink": dict(causal=True, sink=torch.randn(4, dtype=torch.float64)),
    }[name]

    def run(*qkv: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(11)
        return attention(*qkv, dropout_p=0.4, **options)

    with one_thread():
        assert gradcheck(run, tuple(t.requires_grad_() for t in inputs), fast_mode=True)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_drops_the_same(reentrant: bool) -> None:
    inputs, dout = make(32, 32, 2, 4, 2, 8, 8)

    def run(*qkv: torch.Tensor) -> torch.Tensor:
        return attention(*qkv, causal=True, dropout_p=0.3)

    torch.manual_seed(5)
    want = forward_backward(run, inputs, dout)
    after = torch.rand(1)
    torch.manual_seed(5)
    got = forward_backward(lambda *qkv: checkpoint(run, *qkv, use_reentrant=reentrant), inputs, dout)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(torch.rand(1), after), "the generator stands where it would without recomputation"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_matrix_of_scores(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    s, n = 256, 4
    monkeypatch.setattr(blocked, "_SCORES", 1 << 13)
    inputs, dout = make(s, s, 1, n, n, 16, 16, dtype=dtype)
    with Sizes() as sizes, one_thread():
        forward_backward(lambda *qkv: attention(*qkv, causal=True, dropout_p=0.1), inputs, dout)
    assert sizes.largest <= s * n * 16 * 4, "q in fp32 is the largest"
    saved: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved.append(t)
        return t

    leaves = [t.requires_grad_() for t in inputs]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = attention(*leaves, causal=True, dropout_p=0.1)
    own = {t.untyped_storage().data_ptr() for t in (*leaves, out)}
    assert [t.numel() for t in saved if t.untyped_storage().data_ptr() not in own] == [n * s]


def test_no_fallback_and_no_change_of_the_generator_without_dropout() -> None:
    (q, k, v), _ = make(16, 16, 1, 2, 2, 8, 8)
    assert why_not(q, k, v, dropout_p=0.25) == []
    before = torch.get_rng_state()
    attention(q, k, v, causal=True)
    assert torch.equal(torch.get_rng_state(), before)
