"""attention's CUDA path without a GPU: over an emulation of PyTorch's kernels, and on fake CUDA tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mindspeed_lite.ops.attention import autograd, cuda, cuda_flash, cuda_kernels, packed, prepare
from mindspeed_lite.ops.attention.packed import Packing
from tests.harness.compare import forward_backward
from tests.harness.errors import assert_within, bound
from tests.ops import attention_reference as reference
from tests.ops.attention import make
from tests.ops.cuda_twin import Aten

NAMES = ("out", "dq", "dk", "dv", "dsink")
FLASH = ["_flash_attention_forward", "_flash_attention_backward"]
CUDNN = ["_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"]
BLOCKED: list[str] = []
# Calls of flash that cuDNN serves too: no window, causal with as many queries as keys, heads of at most 128.
BY_CUDNN = ("log-sum-exp", "causal", "sink", "smaller values and a sink", "heads of 10 and 5")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Aten:
    aten = Aten()
    monkeypatch.setattr(cuda_kernels, "_aten", aten)
    monkeypatch.setattr(cuda_kernels, "_flash_missing", lambda: ())
    return aten


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """The package's function on the CUDA backend, for CPU tensors."""
    return cuda.attention(q, k, v, prepare(q, k, v, **options))


def by_halves(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """Its kernels without autograd, as context parallelism calls them."""
    return autograd.attention(cuda._KERNELS, q, k, v, prepare(q, k, v, **options))


# sizes, options, kernels in bf16
CALLS: dict[str, tuple[tuple[int, ...], dict[str, Any], list[str]]] = {
    "log-sum-exp": ((12, 12, 2, 4, 2, 8, 8), dict(halves=True), FLASH),
    "causal": ((12, 12, 2, 4, 2, 8, 8), dict(causal=True, halves=True), FLASH),
    "causal, more keys": ((7, 12, 2, 4, 2, 8, 8), dict(causal=True), FLASH),
    "window": ((12, 12, 2, 4, 1, 8, 8), dict(window=(3, 0)), FLASH),
    "two-sided window": ((9, 12, 2, 4, 4, 16, 16), dict(window=(2, 4)), FLASH),
    "window open to the left": ((12, 12, 1, 4, 2, 8, 8), dict(window=(-1, 2), halves=True), FLASH),
    "sink": ((12, 12, 2, 4, 2, 8, 8), dict(causal=True, sink=True, scale=0.3), FLASH),
    "smaller values and a sink": ((12, 12, 2, 4, 2, 24, 16), dict(causal=True, sink=True), FLASH),
    "heads of 10 and 5": ((12, 12, 2, 4, 2, 10, 5), dict(causal=True, sink=True), FLASH),
    "mask and a sink": ((12, 13, 2, 4, 2, 8, 8), dict(mask=(2, 1, 12, 13), sink=True), BLOCKED),
    "mask per head": ((12, 12, 2, 4, 4, 8, 8), dict(mask=(4, 12, 12), causal=True, halves=True), BLOCKED),
    "heads of 264": ((12, 12, 1, 2, 1, 264, 264), dict(causal=True, halves=True), BLOCKED),
    "mask by sdpa": ((12, 12, 2, 4, 2, 8, 8), dict(mask=(2, 1, 12, 12)), []),
    "causal by sdpa": ((12, 12, 2, 4, 2, 8, 8), dict(causal=True), []),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("name", "newer"), [*((name, False) for name in CALLS), *((name, True) for name in CALLS)])
def test_over_the_emulation(
    kernels: Aten, name: str, newer: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, options, wanted = CALLS[name]
    monkeypatch.setattr(cuda_flash, "_is_newer", lambda: newer)
    monkeypatch.setattr(cuda_flash, "_lengths", set())
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    wanted = CUDNN if newer and name in BY_CUDNN else wanted
    options = dict(options)
    if "mask" in options:
        options["mask"] = torch.rand(options["mask"], generator=torch.Generator().manual_seed(4)) > 0.6
        options["mask"][..., 5, :] = True  # a row without keys
    inputs, dout = make(*sizes, dtype=dtype)
    tensors = [*inputs, torch.randn(sizes[3], generator=torch.Generator().manual_seed(1)).to(dtype)]
    tensors = tensors if options.pop("sink", False) else tensors[:3]
    halves = options.pop("halves", False)

    def run(function: Any) -> Any:
        return lambda q, k, v, *sink: function(q, k, v, sink=sink[0] if sink else None, **options)

    exact = forward_backward(run(reference.attention), tensors, dout, torch.float64)
    got = forward_backward(run(by_halves if halves else attention), tensors, dout)
    assert got[0].is_contiguous()
    # Rounding of the output, and of it once more before the backward pass reads it; fp32 sums.
    for part, ours, truth in zip(NAMES, got, exact, strict=False):
        assert ours.dtype == dtype
        # A sink's gradient is a sum over all rows, which cancels.
        assert_within(ours, truth, bound(dtype, 264, roundings=2) * (4 if part == "dsink" else 1), name=part)
    if halves:
        lse = cuda.forward(*inputs, prepare(*inputs, **options))[1]
        truth = reference.forward_half(*(t.double() for t in inputs), **options)[1]
        torch.testing.assert_close(lse.double(), truth, rtol=1e-5, atol=1e-5)
    wanted = BLOCKED if dtype == torch.float32 else wanted
    assert kernels.calls[: len(wanted)] == wanted and bool(kernels.calls) == bool(wanted)


@pytest.mark.parametrize("window", [None, (3, 0)])
@pytest.mark.parametrize("sink", [False, True])
def test_packs_go_to_the_kernel_in_one_call(
    kernels: Aten, window: Any, sink: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "module", lambda spec: cuda)
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(16, n, 8, generator=generator).bfloat16() for n in (4, 2, 2, 4))
    layout = Packing.of([0, 5, 7, 13])  # and three rows of padding
    options = dict(causal=window is None, window=window, sink=torch.randn(4) if sink else None)
    exact = forward_backward(lambda *qkv: reference.packed(*qkv, layout, **options), (q, k, v), dout, torch.float64)
    got = forward_backward(lambda *qkv: packed.attention(*qkv, layout, **options), (q, k, v), dout)
    assert kernels.calls == FLASH
    for part, ours, truth in zip(NAMES, got, exact, strict=False):
        assert_within(ours, truth, bound(ours.dtype, 16, roundings=2) * (4 if part == "dsink" else 1), name=part)


def test_deterministic_sums_are_not_cudnns(kernels: Aten, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_flash, "_is_newer", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    (q, k, v), _ = make(12, 12, 1, 2, 2, 8, 8, dtype=torch.bfloat16)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    by_halves(q, k, v, causal=True)
    assert kernels.calls == FLASH[:1]


def test_dropout_with_a_sink_has_its_own_path(kernels: Aten) -> None:
    (q, k, v), _ = make(12, 12, 1, 2, 2, 8, 8)
    torch.manual_seed(0)
    out = attention(q, k, v, dropout_p=0.5, sink=torch.zeros(2))
    torch.manual_seed(0)
    assert torch.equal(attention(q, k, v, dropout_p=0.5, sink=torch.zeros(2)), out) and kernels.calls == []


def test_reasons_name_what_flash_does_not_take() -> None:
    q, v = torch.zeros(2, 1, 1, 300), torch.zeros(2, 1, 1, 8)
    reasons = cuda_kernels.why_not_flash(prepare(q, q, v).case)
    assert "float32" in reasons[0] and "300" in reasons[1]


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("name", [name for name, (_, _, wanted) in CALLS.items() if wanted])
def test_on_fake_tensors(name: str, newer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own fake kernels take the calls: names, order and shapes. (Autograd wants a real device.)"""
    monkeypatch.setattr(cuda_kernels, "_flash_missing", lambda: ())
    monkeypatch.setattr(cuda_flash, "_is_newer", lambda: newer)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    sizes, options, _ = CALLS[name]
    sq, sk, b, n, g, d, dv = sizes
    with FakeTensorMode(), torch.no_grad():
        q, k, v = (
            torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            for shape in ((sq, b, n, d), (sk, b, g, d), (sk, b, g, dv))
        )
        spec = prepare(q, k, v, causal=options.get("causal", False), window=options.get("window"))
        out, lse = cuda.forward(q, k, v, spec)
        assert (out.shape, out.dtype, out.is_contiguous()) == ((sq, b, n, dv), torch.bfloat16, True)
        assert (lse.shape, lse.dtype) == ((b, n, sq), torch.float32)
        grads = cuda.backward(out, q, k, v, out, lse, spec)
        assert [each.shape for each in grads] == [q.shape, k.shape, v.shape]
