"""attention: its reference against Megatron's formula, every other path against the reference in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck
from torch.profiler import ProfilerActivity, profile

from mindspeed_lite.ops.attention import OPERATOR, attention, band, cpu, prepare
from mindspeed_lite.ops.dispatch import force
from tests.harness import attention_reference as reference
from tests.harness.attention import assert_right, make, slack
from tests.harness.compare import Sizes, assert_not_worse, error, forward_backward, one_thread
from tests.harness.reasons import why_not_of

why_not = why_not_of(attention)

NAMES = ("out", "dq", "dk", "dv")


def megatron_window_mask(sq: int, sk: int, window: tuple[int, int]) -> torch.Tensor:
    """Megatron's sliding-window mask: True is hidden."""
    ones = torch.ones(sq, sk, dtype=torch.bool)
    return ~ones.triu(sk - sq - window[0]).tril(sk - sq + window[1])


def megatron_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """What Megatron's local DotProductAttention computes, with its softmax in fp32."""
    sq, b, n, d = q.shape
    sk, _, g, dv = v.shape
    k, v = (t.repeat_interleave(n // g, dim=2) for t in (k, v))
    scores = torch.baddbmm(
        torch.empty(b * n, sq, sk, dtype=q.dtype),
        q.reshape(sq, b * n, d).transpose(0, 1),
        k.reshape(sk, b * n, d).permute(1, 2, 0),
        beta=0.0,
        alpha=scale,
    ).view(b, n, sq, sk)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    if mask is not None:
        scores = scores.masked_fill(mask, -10000.0)
    probs = scores.softmax(-1).to(q.dtype).view(b * n, sq, sk)
    context = torch.bmm(probs, v.reshape(sk, b * n, dv).transpose(0, 1))
    return context.view(b, n, sq, dv).permute(2, 0, 1, 3).contiguous()


def hidden(sq: int, sk: int, options: dict[str, Any]) -> torch.Tensor | None:
    """The whole mask of a call, built the long way."""
    mask = options.get("mask")
    if options.get("causal"):
        causal = torch.ones(sq, sk, dtype=torch.bool).triu(sk - sq + 1)
        mask = causal if mask is None else mask | causal
    left, right = options.get("window") or (-1, -1)
    limits = (left if left >= 0 else sq + sk, right if right >= 0 else sq + sk)
    by_window = megatron_window_mask(sq, sk, limits)
    return by_window if mask is None else mask | by_window


def test_reference_is_megatrons_formula_where_a_row_has_keys() -> None:
    (q, k, v), dout = make(9, 13, 2, 4, 2, 8, 6, torch.float64)
    mask = torch.rand(2, 1, 9, 13, generator=torch.Generator().manual_seed(3)) > 0.5
    mask[1, 0, 4] = True
    dout[4, 1] = 0
    want = forward_backward(lambda q, k, v: megatron_attention(q, k, v, mask, 8**-0.5), (q, k, v), dout)
    got = forward_backward(lambda q, k, v: reference.attention(q, k, v, mask=mask), (q, k, v), dout)
    # Megatron averages all values in the row without keys, where we return zeros.
    torch.testing.assert_close(want[0][4, 1], v.mean(0)[1].repeat_interleave(2, dim=0))
    want[0][4, 1] = 0
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sq", [1, 2, 5, 8])
@pytest.mark.parametrize("sk", [1, 2, 5, 8])
def test_bands_are_megatrons_masks(sq: int, sk: int) -> None:
    device = torch.device("cpu")
    for causal in (False, True):
        for window in (None, *((left, right) for left in (-1, 0, 1, 3, 6, 7) for right in (-1, 0, 1, 4, 7))):
            canonical = band.canonical(causal, window, sq, sk)
            assert band.canonical(*canonical, sq, sk) == canonical
            limits = band.CAUSAL if canonical[0] else canonical[1]
            got = torch.zeros(sq, sk, dtype=torch.bool)
            if limits is not None:
                got = band.hidden(sq, sk, limits, device)
                assert got.any(), "a band that hides nothing has no canonical form of its own"
            assert torch.equal(got, hidden(sq, sk, dict(causal=causal, window=window))), (causal, window)
            empty = got.all(-1)
            assert band.rows_without_keys(*canonical, sq, sk) == empty.sum() == empty.cumprod(0).sum()


def test_megatrons_causal_masks_are_ours() -> None:
    device = torch.device("cpu")
    default = torch.ones(6, 6).triu(1).bool()
    assert torch.equal(band.hidden(6, 6, band.CAUSAL, device), default)
    assert torch.equal(band.hidden(6, 6, (4, 0), device), megatron_window_mask(6, 6, (4, 0)))
    assert band.canonical(True, None, 1, 6) == (False, None)
    assert band.canonical(False, (8, 0), 6, 6) == (True, None)
    assert band.canonical(True, (2, 5), 6, 6) == (False, (2, 0))


SHAPES = {
    "plain": (128, 128, 2, 4, 4, 64, 64, dict()),
    "causal": (128, 128, 2, 4, 4, 64, 64, dict(causal=True)),
    "causal, several blocks, grouped": (520, 520, 1, 8, 2, 32, 32, dict(causal=True)),
    "one key head": (100, 100, 2, 4, 1, 40, 40, dict(causal=True)),
    "more keys than queries": (48, 160, 2, 4, 2, 32, 32, dict(causal=True)),
    "window": (128, 128, 2, 4, 2, 32, 32, dict(window=(20, 0))),
    "smaller values": (96, 96, 2, 4, 2, 48, 32, dict(causal=True)),
    "larger values": (96, 96, 2, 4, 4, 32, 48, dict(causal=True)),
    "mask": (64, 64, 2, 4, 2, 32, 32, dict(mask=(2, 1))),
    "mask per head": (64, 64, 2, 4, 2, 32, 32, dict(mask=(1, 4))),
    "mask and causal": (64, 64, 2, 4, 4, 32, 32, dict(mask=(1, 1), causal=True)),
    "scale": (64, 64, 1, 2, 2, 32, 32, dict(scale=0.4, causal=True)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", SHAPES)
def test_error_is_not_above_that_of_megatron(name: str, dtype: torch.dtype) -> None:
    *sizes, options = SHAPES[name]
    sq, sk, d = sizes[0], sizes[1], sizes[5]
    options = dict(options)
    if "mask" in options:
        # The first key stays visible: in a row without keys the two differ on purpose.
        mask = torch.rand(*options["mask"], sq, sk, generator=torch.Generator().manual_seed(1)) > 0.5
        mask[..., 0] = False
        options["mask"] = mask
    inputs, dout = make(*sizes, dtype=dtype)
    whole, scale = hidden(sq, sk, options), options.get("scale", d**-0.5)
    exact = forward_backward(lambda q, k, v: reference.attention(q, k, v, **options), inputs, dout, torch.float64)
    replaced = forward_backward(lambda q, k, v: megatron_attention(q, k, v, whole, scale), inputs, dout)
    with force("attention", "cpu"):
        got = forward_backward(lambda q, k, v: attention(q, k, v, **options), inputs, dout)
    assert_not_worse(got, replaced, exact, slack(*inputs[:2], whole, scale), NAMES)


@st.composite
def calls(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[str, Any], torch.dtype, int]:
    sq, sk, b = draw(st.integers(1, 40)), draw(st.integers(1, 40)), draw(st.integers(1, 3))
    g, ratio = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    d, dv = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["causal"] = True
    if draw(st.booleans()):
        options["window"] = (draw(st.integers(-1, 12)), draw(st.integers(-1, 12)))
    if draw(st.booleans()):
        sizes = [draw(st.sampled_from([1, size])) for size in (b, g * ratio, sq, sk)]
        options["mask"] = torch.rand(sizes[draw(st.integers(0, 3)) :]) > draw(st.sampled_from([0.1, 0.5, 0.9]))
    if draw(st.booleans()):
        options["scale"] = draw(st.floats(0.01, 1.0))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]))
    return (sq, sk, b, g * ratio, g, d, dv), options, dtype, draw(st.integers(0, 1000))


@settings(max_examples=80)
@given(calls())
def test_any_call_agrees_with_the_reference(
    call: tuple[tuple[int, ...], dict[str, Any], torch.dtype, int],
) -> None:
    sizes, options, dtype, seed = call
    inputs, dout = make(*sizes, dtype=dtype, seed=seed)
    with one_thread():
        exact = forward_backward(lambda q, k, v: reference.attention(q, k, v, **options), inputs, dout, torch.float64)
        got = forward_backward(lambda q, k, v: attention(q, k, v, **options), inputs, dout)
    assert got[0].is_contiguous() and all(ours.dtype == dtype for ours in got)
    assert_right(got, exact, inputs, dout, options)


def test_a_gradient_that_is_zero_or_of_the_other_sign_is_none() -> None:
    """The bound that drawn calls are held to, on small ones in bf16: at least two keys, or dq and dk are zero."""
    accepted = 0
    for seed in range(100):
        inputs, dout = make(2 + seed % 5, 2 + seed % 7, 1, 2, 1 + seed % 2, 8, 8, torch.bfloat16, seed)
        exact = forward_backward(reference.attention, inputs, dout, torch.float64)
        for wrong in ([0 * each for each in exact], [-each for each in exact]):
            for place in range(4):
                mixed = [wrong[i] if i == place else exact[i] for i in range(4)]
                try:
                    assert_right(mixed, exact, inputs, dout, {})
                    accepted += 1
                except AssertionError:
                    pass
    assert accepted <= 8


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(causal=True),
        dict(window=(2, 1)),
        dict(mask=True),
        dict(mask=True, causal=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("sizes", [(4, 4, 2, 2, 1, 3, 3), (3, 5, 1, 2, 1, 3, 2), (4, 4, 1, 2, 2, 2, 3)])
def test_gradcheck(sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    inputs, _ = make(*sizes, dtype=torch.float64)
    options = dict(options)
    if "mask" in options:
        options["mask"] = torch.rand(sizes[0], sizes[1], generator=torch.Generator().manual_seed(0)) > 0.6
        options["mask"][1] = True  # a row without keys
    leaves = tuple(t.requires_grad_() for t in inputs)
    with one_thread():
        assert gradcheck(lambda q, k, v: attention(q, k, v, **options), leaves)


@pytest.mark.parametrize("sizes", [(32, 2, 4, 4, 16), (32, 2, 8, 2, 16), (32, 1, 4, 1, 16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_views_of_a_packed_projection(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """q, k and v as Megatron cuts them out of [s, b, g, (n / g + 2) * d]."""
    s, b, n, g, d = sizes
    packed = torch.randn(s, b, g, (n // g + 2) * d, generator=torch.Generator().manual_seed(0)).to(dtype)
    dout = torch.randn(s, b, n, d, generator=torch.Generator().manual_seed(1)).to(dtype)

    def cut(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = packed.split([n // g * d, d, d], dim=3)
        return q.reshape(s, b, n, d), k, v

    def run(clone: bool) -> list[torch.Tensor]:
        def function(packed: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.contiguous() if clone else t for t in cut(packed))
            assert clone or not k.is_contiguous()
            return attention(q, k, v, causal=True)

        return forward_backward(function, (packed,), dout)

    for views, copies in zip(run(clone=False), run(clone=True), strict=True):
        assert torch.equal(views, copies)


def test_strided_last_dimension() -> None:
    (q, k, v), dout = make(12, 12, 2, 4, 2, 8, 8)
    want = forward_backward(lambda q, k, v: attention(q, k, v, causal=True), (q, k, v), dout)
    views = [torch.stack([t, t], -1)[..., 0] for t in (q, k, v)]
    leaves = [t.detach().requires_grad_() for t in views]
    out = attention(*leaves, causal=True)
    out.backward(torch.stack([dout, dout], -1)[..., 0])
    assert torch.equal(out, want[0])
    for leaf, grad in zip(leaves, want[1:], strict=True):
        assert leaf.grad is not None and torch.equal(leaf.grad, grad)


@pytest.mark.parametrize("options", [dict(), dict(causal=True), dict(window=(3, 0))], ids=str)
def test_rows_without_keys_are_zero_and_give_no_gradient(options: dict[str, Any]) -> None:
    (q, k, v), dout = make(8, 8, 2, 4, 2, 8, 8)
    mask = torch.zeros(2, 1, 8, 8, dtype=torch.bool)
    mask[0, 0, 3] = True
    mask[1] = True
    out, dq, dk, dv = forward_backward(lambda q, k, v: attention(q, k, v, mask=mask, **options), (q, k, v), dout)
    for part in (out, dq, dk, dv):
        assert part.isfinite().all()
        assert not part[:, 1].any()
    assert not out[3].any() and not dq[3].any()
    assert out[4, 0].any() and dk[:, 0].any()


@pytest.mark.parametrize("options", [dict(causal=True), dict(window=(2, 1)), dict(causal=True, mask=True)], ids=str)
def test_more_queries_than_keys_leave_leading_rows_empty(options: dict[str, Any]) -> None:
    (q, k, v), dout = make(8, 5, 2, 4, 2, 8, 8)
    if "mask" in options:
        options = {**options, "mask": torch.rand(2, 1, 8, 5, generator=torch.Generator().manual_seed(0)) > 0.7}
    assert why_not(q, k, v, **options) == []
    exact = forward_backward(lambda q, k, v: reference.attention(q, k, v, **options), (q, k, v), dout, torch.float64)
    got = forward_backward(lambda q, k, v: attention(q, k, v, **options), (q, k, v), dout)
    for name, ours, truth in zip(NAMES, got, exact, strict=True):
        assert error(ours, truth) < 2e-6, name
    hidden_rows = 2 if "window" in options else 3
    assert not got[0][:hidden_rows].any() and not got[1][:hidden_rows].any() and got[0][4].any()


@pytest.mark.parametrize("sizes", [(0, 4, 2), (4, 0, 2), (4, 4, 0)])
def test_empty_tensors(sizes: tuple[int, int, int]) -> None:
    sq, sk, b = sizes
    (q, k, v), dout = make(sq, sk, b, 4, 2, 8, 8)
    got = forward_backward(lambda q, k, v: attention(q, k, v, causal=sq == sk), (q, k, v), dout)
    assert [part.shape for part in got] == [dout.shape, q.shape, k.shape, v.shape]
    assert not any(part.any() for part in got)


def test_only_the_wanted_gradients_are_made() -> None:
    (q, k, v), dout = make(6, 6, 1, 2, 2, 4, 4)
    _, _, dk, _ = forward_backward(lambda q, k, v: attention(q, k, v, causal=True), (q, k, v), dout)
    k.requires_grad_()
    attention(q, k, v, causal=True).backward(dout)
    assert q.grad is None and v.grad is None
    assert k.grad is not None and torch.equal(k.grad, dk)
    with torch.no_grad():
        assert not attention(q, k, v, causal=True).requires_grad


@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_causal_attention_never_holds_the_scores(dtype: torch.dtype, groups: int) -> None:
    s = 2048
    inputs, dout = make(s, s, 1, 8, groups, 16, 16, dtype)
    leaves = [t.requires_grad_() for t in inputs]
    recorder = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    with Sizes() as sizes, recorder as profiled:
        attention(*leaves, causal=True).backward(dout)
    if not cpu.takes(prepare(*inputs).case) or cpu.unusable() is not None:
        assert any("flash" in name and "backward" not in name for name in sizes.names)
    one_head = s * s * dtype.itemsize
    assert sizes.largest < one_head / 4
    # Also inside the kernels: no single allocation of the size of one head's scores.
    allocations = [event.cpu_memory_usage for event in profiled.events() if event.name == "[memory]"]
    assert allocations and max(allocations) < one_head / 4
    assert max(t.numel() for t in leaves if t.grad is not None) == s * 8 * 16


def test_the_output_is_written_where_it_stays() -> None:
    """No copy turns the kernel's [b, s, n, d] into [s, b, n, d]."""
    (q, k, v), _ = make(16, 16, 3, 4, 2, 8, 8)
    with Sizes() as sizes:
        out = attention(q, k, v, causal=True)
    assert out.is_contiguous()
    assert not {name for name in sizes.names if "clone" in name or "copy" in name or "repeat" in name}


def test_backward_keeps_inputs_output_and_one_number_per_row() -> None:
    (q, k, v), _ = make(64, 64, 2, 4, 2, 16, 16, torch.bfloat16)
    saved: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved.append(t)
        return t

    leaves = [t.requires_grad_() for t in (q, k, v)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = attention(*leaves, causal=True)
    own = {t.untyped_storage().data_ptr() for t in (*leaves, out)}
    kept = [t for t in saved if t.untyped_storage().data_ptr() not in own]
    assert [(t.numel(), t.dtype) for t in kept] == [(64 * 2 * 4, torch.float32)]


@pytest.mark.parametrize("options", [dict(causal=True), dict(window=(4, 0)), dict(mask=True)], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_compiles(options: dict[str, Any]) -> None:
    (q, k, v), dout = make(16, 16, 2, 4, 2, 8, 8)
    options = dict(options)
    if "mask" in options:
        options["mask"] = torch.ones(16, 16).triu(2).bool()
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: attention(q * 1.0, k, v, **options), backend="aot_eager")
    exact = forward_backward(lambda q, k, v: reference.attention(q, k, v, **options), (q, k, v), dout, torch.float64)
    got = forward_backward(compiled, (q, k, v), dout)
    for name, ours, truth in zip(NAMES, got, exact, strict=True):
        assert error(ours, truth) < 2e-6, name


def test_wrong_arguments_are_refused() -> None:
    (q, k, v), _ = make(4, 4, 2, 4, 2, 8, 8)
    for match, arguments, options in (
        ("sequence, batch", (q[0], k, v), dict()),
        ("fit together", (q[:, :, :3], k, v), dict()),
        ("fit together", (q, k[:3], v), dict()),
        ("fit together", (q, k[:, :1], v[:, :1]), dict()),
        ("fit together", (q[..., :4], k, v), dict()),
        ("one dtype", (q, k.double(), v), dict()),
        ("dropout_p", (q, k, v), dict(dropout_p=1.0)),
        ("one number for each of 4 heads", (q, k, v), dict(sink=torch.zeros(2))),
        ("must be bool", (q, k, v), dict(mask=torch.zeros(4, 4))),
        ("does not broadcast", (q, k, v), dict(mask=torch.zeros(3, 1, 4, 4, dtype=torch.bool))),
        ("does not broadcast", (q, k, v), dict(mask=torch.zeros(1, 1, 1, 4, 4, dtype=torch.bool))),
    ):
        with pytest.raises(ValueError, match=match):
            attention(*arguments, **options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", SHAPES)
def test_cuda(name: str, dtype: torch.dtype) -> None:
    *sizes, options = SHAPES[name]
    options = dict(options)
    if "mask" in options:
        options["mask"] = torch.rand(*options["mask"], sizes[0], sizes[1]) > 0.5
        options["mask"][..., 3, :] = True  # a row without keys
    inputs, dout = make(*sizes, dtype=dtype)
    exact = forward_backward(lambda q, k, v: reference.attention(q, k, v, **options), inputs, dout, torch.float64)
    if "mask" in options:
        options["mask"] = options["mask"].cuda()
    with force("attention", "cuda"):
        got = forward_backward(lambda q, k, v: attention(q, k, v, **options), [t.cuda() for t in inputs], dout.cuda())
    # Fused kernels round p, ds and the result to the dtype; fp32 may run through TF32-free products only.
    allowed = 2 * torch.finfo(dtype).eps + 4e-6
    for part, ours, truth in zip(NAMES, got, exact, strict=True):
        assert ours.isfinite().all()
        assert error(ours.cpu(), truth) <= allowed, part
    assert OPERATOR.unusable("cuda") == []
