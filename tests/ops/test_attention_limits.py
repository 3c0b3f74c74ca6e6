"""Calls at the edge of what attention's kernels take: instruction sets, switches, NaN, and numbers out of range."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from mindspeed_lite.ops import native
from mindspeed_lite.ops.attention import attention, cpu
from tests.harness.errors import assert_within, bound
from tests.ops import attention_reference as reference

DTYPES = [torch.bfloat16, torch.float16, torch.float32]

_CHILD = """
import logging, sys, torch
logging.basicConfig(level=logging.INFO)
from mindspeed_lite.ops.attention import attention
from tests.ops import attention_reference as reference

if "off" in sys.argv:
    torch._C._set_mkldnn_enabled(False)
for dtype in (torch.bfloat16, torch.float32):
    for options in (dict(causal=True), dict(window=(3, 0)), dict(causal=True, dropout_p=0.25)):
        q, k, v = (torch.randn(9, 2, 2, 8).to(dtype).requires_grad_() for _ in range(3))
        out = attention(q, k, v, **options)
        out.backward(torch.ones_like(out))
        assert q.grad.isfinite().all() and k.grad.isfinite().all() and v.grad.isfinite().all()
        if "dropout_p" not in options:
            want = reference.attention(q.detach().double(), k.detach().double(), v.detach().double(), **options)
            assert (out.double() - want).abs().max() < 0.05, (dtype, options)
"""


@pytest.mark.parametrize(
    ("isa", "arguments"),
    [
        ("AVX2", ()),
        ("SSE41", ()),
        ("", ("off",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value or "all",
)
def test_no_micro_kernel_is_a_reason_and_never_ends_the_process(isa: str, arguments: tuple[str, ...]) -> None:
    environment = {**os.environ, **({"ONEDNN_MAX_CPU_ISA": isa} if isa else {})}
    command = [sys.executable, "-c", _CHILD, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    if cpu.unusable() is None:
        # Products of fp32 numbers serve for bf16 too; below AVX2 it is oneDNN that says whether there are any.
        falls_back = "attention: cpu falls back to PyTorch, a block of rows at a time: oneDNN" in done.stderr
        assert isa == "SSE41" or falls_back == bool(arguments), done.stderr[-2000:]


def test_the_switch_of_onednn_is_read_on_every_call(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = (torch.randn(9, 1, 2, 8) for _ in range(3))
    want = attention(q, k, v, causal=True)
    torch._C._set_mkldnn_enabled(False)
    try:
        assert cpu.unusable() == "oneDNN is switched off (torch.backends.mkldnn)"
        assert_within(attention(q, k, v, causal=True), want, bound(want.dtype, 9, 2))
    finally:
        torch._C._set_mkldnn_enabled(True)
    assert torch.equal(attention(q, k, v, causal=True), want)


@pytest.mark.skipif(cpu.unusable() is not None, reason="no kernel of our own here")
def test_memory_that_is_not_there_is_an_exception() -> None:
    sizes = native.numbers([1, 1, 1, 1, 1, 1 << 50, 1, *[1] * 9, 0, 0, *[0] * 9])
    q = torch.zeros(1)
    with pytest.raises(MemoryError):
        cpu._library.forward_float(*[q.data_ptr()] * 3, sizes, None, 1.0, *[q.data_ptr()] * 2, 0, 1)


def test_dropout_that_cannot_be_drawn_again_is_refused() -> None:
    q, k, v = (torch.randn(9, 1, 2, 8).requires_grad_() for _ in range(3))
    out = attention(q, k, v, dropout_p=0.5)
    if cpu.unusable() is not None:
        pytest.skip("no kernel of our own here")
    torch._C._set_mkldnn_enabled(False)
    try:
        with pytest.raises(RuntimeError, match="can no longer be used: oneDNN is switched off"):
            out.sum().backward()
    finally:
        torch._C._set_mkldnn_enabled(True)


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "PyTorch's"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_query_row_is_nan_alone(
    dtype: torch.dtype, dropout_p: float, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ours:
        monkeypatch.setattr(cpu, "_in_kernel", lambda q, spec: False)
    q, k, v = (torch.randn(140, 1, 2, 8).to(dtype) for _ in range(3))
    q[3, 0, 1] = torch.nan
    for options in (dict(), dict(causal=True), dict(mask=torch.ones(140, 140).triu(5).bool())):
        out = attention(q, k, v, dropout_p=dropout_p, **options)
        assert out[3, 0, 1].isnan().all()
        out[3, 0, 1] = 0.0
        assert out.isfinite().all(), options


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan"), float("inf"), 1e-60, 1e39])
def test_a_scale_that_hidden_scores_do_not_survive_is_refused(scale: float) -> None:
    q, k, v = (torch.randn(6, 1, 2, 8) for _ in range(3))
    with pytest.raises(ValueError, match="scale must be above 0 and finite"):
        attention(q, k, v, causal=True, scale=scale)


@pytest.mark.parametrize("p", [1 - 2**-34, 1 - 2**-40, 1 - 2**-53, 1 - 2**-26])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_close_to_one_drops_nearly_everything(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(64, 1, 2, 8).to(dtype).requires_grad_() for _ in range(3))
    out = attention(q, k, v, dropout_p=p)
    # Without a kernel of ours at least 2^-16 is kept: 0.125 of these 8192 weights.
    assert out.isfinite().all() and int((out != 0).any(-1).sum()) <= 2
    out.sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in (q, k, v))


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "PyTorch's"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_hidden_key_holds_does_not_show(
    dtype: torch.dtype, value: float, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ours:
        monkeypatch.setattr(cpu, "_in_kernel", lambda q, spec: False)
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(12, 2, 2, 8, generator=generator).to(dtype) for _ in range(4))
    hidden = torch.zeros(2, 1, 12, 12, dtype=torch.bool)
    hidden[0, ..., 7:] = True
    clean = k.clone()
    k[7:, 0] = value
    clean[7:, 0] = 0.0
    out, want = attention(q, k, v, mask=hidden), attention(q, clean, v, mask=hidden)
    exact = reference.attention(q.double(), clean.double(), v.double(), mask=hidden)
    for found in (out, want):
        assert_within(found, exact, bound(dtype, 12, 2))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    attention(*leaves, mask=hidden).backward(dout)
    twins = [t.clone().requires_grad_() for t in (q, clean, v)]
    attention(*twins, mask=hidden).backward(dout)
    # dq is the sum of 0 * k over hidden keys too, which is NaN by the definition.
    for leaf, twin in zip(leaves[1:], twins[1:], strict=True):
        assert_within(leaf.grad, twin.grad.double(), bound(dtype, 12, 3))


@pytest.mark.parametrize("window", [(3, 0), (2, 1)])
def test_what_a_key_outside_the_window_holds_does_not_show(window: tuple[int, int]) -> None:
    q, k, v = (torch.randn(12, 1, 2, 8).half() for _ in range(3))
    k[9:] = torch.inf
    out = attention(q, k, v, window=window)
    exact = reference.attention(q.double(), k.double(), v.double(), window=window)
    assert_within(out[:8], exact[:8], bound(out.dtype, 4, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_without_features_weigh_every_visible_value_alike(dtype):
    torch.manual_seed(0)
    q, k = (torch.randn(5, 1, 2, 0, dtype=dtype, requires_grad=True) for _ in range(2))
    v = torch.randn(5, 1, 2, 8, dtype=dtype, requires_grad=True)
    out = attention(q, k, v, causal=True)
    wanted = torch.stack([v[: row + 1].double().mean(0) for row in range(5)])
    assert_within(out, wanted, bound(dtype, 5))
    out.sum().backward()
    shares = torch.tensor([sum(1 / (row + 1) for row in range(key, 5)) for key in range(5)])
    assert_within(v.grad[:, 0, 0, 0], shares, bound(dtype, 5))
    assert q.grad.shape == q.shape and k.grad.shape == k.shape
