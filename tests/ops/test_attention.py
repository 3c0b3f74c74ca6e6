"""attention: its reference against Megatron's formula, every other path against the reference in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from mindspeed_lite.ops import native
from mindspeed_lite.ops.attention import attention, band, cpu
from tests.harness.compare import Sizes, forward_backward
from tests.ops.attention import make


def megatron_window_mask(sq: int, sk: int, window: tuple[int, int]) -> torch.Tensor:
    """Megatron's sliding-window mask: True is hidden."""
    ones = torch.ones(sq, sk, dtype=torch.bool)
    return ~ones.triu(sk - sq - window[0]).tril(sk - sq + window[1])


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
            assert band.has_rows_without_keys(*canonical, sq, sk) == bool(empty.any())


def test_megatrons_causal_masks_are_ours() -> None:
    device = torch.device("cpu")
    default = torch.ones(6, 6).triu(1).bool()
    assert torch.equal(band.hidden(6, 6, band.CAUSAL, device), default)
    assert torch.equal(band.hidden(6, 6, (4, 0), device), megatron_window_mask(6, 6, (4, 0)))
    assert band.canonical(True, None, 1, 6) == (False, None)
    assert band.canonical(False, (8, 0), 6, 6) == (True, None)
    assert band.canonical(True, (2, 5), 6, 6) == (False, (2, 0))


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


@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_causal_attention_never_holds_the_scores(dtype: torch.dtype, groups: int) -> None:
    s = 2048
    inputs, dout = make(s, s, 1, 8, groups, 16, 16, dtype)
    leaves = [t.requires_grad_() for t in inputs]
    recorder = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    with Sizes() as sizes, recorder as profiled:
        attention(*leaves, causal=True).backward(dout)
    if dtype not in native.DTYPES or cpu.unusable() is not None:
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
