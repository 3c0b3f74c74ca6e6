"""Which kernels attention takes on CUDA: stand-ins for PyTorch's switches, what is restored, and memory of windows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mindspeed_lite.ops.attention import cuda, cuda_flash, prepare
from tests.harness.compare import Sizes
from tests.ops.attention import make


class Switches:
    """torch.nn.attention's registry of implementations, and a device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: int, installed: bool = True) -> None:
        self.active: str | None = None
        self.orders: list[list[str]] = []
        self.broken = False
        attention = torch.nn.attention
        for name, value in (
            ("activate_flash_attention_impl", self.activate),
            ("current_flash_attention_impl", lambda: self.active),
            ("restore_flash_attention_impl", self.restore),
            ("sdpa_kernel", self.sdpa_kernel),
        ):
            monkeypatch.setattr(attention, name, value, raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (capability, 0))
        monkeypatch.setattr(cuda_flash, "_is_installed", lambda _: installed)
        monkeypatch.setattr(cuda_flash, "_is_newer", lambda: capability >= 9)
        monkeypatch.setattr(cuda_flash, "_lengths", set())

    def activate(self, name: str) -> None:
        if self.broken:
            raise RuntimeError("does not expose kernels")
        self.active = name

    def restore(self) -> None:
        assert self.active is not None
        self.active = None

    @contextlib.contextmanager
    def sdpa_kernel(self, backends: list[Any], set_priority: bool = False) -> Iterator[None]:
        assert set_priority
        self.orders.append([each.name for each in backends])
        yield


Make = Callable[..., Switches]


@pytest.fixture
def switches(monkeypatch: pytest.MonkeyPatch) -> Make:
    return lambda *given, **named: Switches(monkeypatch, *given, **named)


@pytest.mark.parametrize(("capability", "name"), [(9, "FA3"), (10, "FA4")])
def test_what_is_written_for_a_device_is_activated_and_taken_out_again(
    switches: Make, capability: int, name: str
) -> None:
    found = switches(capability)
    choice, undo = cuda_flash.activate(dropout=False, window=False)
    assert found.active == name and str(choice) == f"flash attention is {name}"
    undo()
    assert found.active is None
    undo()  # nothing is left to do


def test_what_somebody_activated_since_or_before_stays(switches: Make) -> None:
    found = switches(9)
    found.active = "mine"
    choice, undo = cuda_flash.activate(dropout=False, window=False)
    undo()
    assert found.active == "mine" and choice == ("mine", ())
    found.active = None
    _, undo = cuda_flash.activate(dropout=False, window=False)
    found.active = "later"
    undo()
    assert found.active == "later"


@pytest.mark.parametrize(
    ("capability", "installed", "broken", "calls", "words"),
    [
        (9, False, False, {}, "FA3: flash_attn_interface is not installed"),
        (10, False, False, {}, "FA4: flash_attn.cute.interface is not installed"),
        (9, True, True, {}, "FA3: RuntimeError: does not expose kernels"),
        (9, True, False, {"dropout": True}, "FA3 takes no dropout"),
        (10, True, False, {"window": True}, "FA4 has no backward pass for a window"),
    ],
)
def test_what_keeps_fa2_is_named(
    switches: Make, capability: int, installed: bool, broken: bool, calls: dict[str, bool], words: str
) -> None:
    found = switches(capability, installed)
    found.broken = broken
    choice, undo = cuda_flash.activate(**{"dropout": False, "window": False, **calls})
    assert found.active is None and choice == ("FA2", (words,))
    assert str(choice) == f"flash attention is cuDNN's where it serves, else FA2: {words}"
    undo()


def test_older_devices_have_fa2_without_a_reason(switches: Make) -> None:
    found = switches(8)
    cuda_flash.activate(dropout=False, window=False)
    (q, k, v), _ = make(8, 8, 1, 2, 2, 8, 8, dtype=torch.bfloat16)
    cuda.attention(q, k, v, prepare(q, k, v, causal=True))
    assert found.active is None and found.orders == []
    assert cuda_flash.choose(8, dropout=False, window=False) == ("FA2", ())


def test_cudnn_is_asked_first_where_no_other_is_active(switches: Make) -> None:
    found = switches(9)
    (q, k, v), _ = make(8, 8, 1, 2, 2, 8, 8, dtype=torch.bfloat16)
    cuda.attention(q, k, v, prepare(q, k, v, causal=True))
    assert found.orders == [["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]]
    found.active = "FA3"
    cuda.attention(q, k, v, prepare(q, k, v, causal=True))
    assert len(found.orders) == 1


def test_cudnn_plans_no_more_than_sixteen_lengths(switches: Make) -> None:
    found = switches(9)
    for length in [*range(8, 28), 8]:
        with cuda_flash.order(masked=False, queries=length, keys=length):
            pass
    firsts = [order[0] for order in found.orders]
    assert firsts == ["CUDNN_ATTENTION"] * 16 + ["FLASH_ATTENTION"] * 4 + ["CUDNN_ATTENTION"]


@pytest.mark.parametrize("capability", [8, 9])
@pytest.mark.parametrize(("options", "queries"), [({"mask": 1}, 8), ({}, 1)])
def test_cudnn_is_not_asked_where_it_errs(
    switches: Make, capability: int, options: dict[str, Any], queries: int
) -> None:
    found = switches(capability)
    (q, k, v), _ = make(queries, queries, 1, 2, 2, 8, 8, dtype=torch.bfloat16)
    mask = torch.zeros(1, 1, queries, queries, dtype=torch.bool) if options else None
    cuda.attention(q, k, v, prepare(q, k, v, causal=True, mask=mask))
    assert found.orders == [["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_masked_gradients_are_finite_for_small_sums() -> None:
    """pytorch 196678: every logit is about -120."""
    length, width = 192, 64
    (q, k, v), dout = make(length, length, 1, 1, 1, width, width, dtype=torch.bfloat16)
    for tensor, first in ((q, 1.0), (k, -120 * width**0.5)):
        tensor.mul_(0.1)[..., 0] = first
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    leaves = [each.detach().cuda().requires_grad_() for each in (q, k, v)]
    out = cuda.attention(*leaves, prepare(*leaves, mask=mask.cuda()))
    for gradient in torch.autograd.grad(out, leaves, dout.cuda()):
        assert gradient.isfinite().all()


def test_torch_restores_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch._C._get_sdp_priority_order()
    monkeypatch.setattr(cuda_flash, "_is_newer", lambda: True)
    with cuda_flash.order(masked=False, queries=8, keys=8):
        assert torch._C._get_sdp_priority_order() != before
    assert torch._C._get_sdp_priority_order() == before


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize(("options", "dtype"), [(dict(window=(64, 0)), torch.float32), (dict(mask=1), torch.float32)])
def test_fp32_memory_is_linear(options: dict[str, Any], dtype: torch.dtype, dropout: float) -> None:
    largest = []
    for length in (1024, 2048):
        (q, k, v), dout = make(length, length, 1, 1, 1, 16, 16, dtype=dtype)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        if "mask" in options:
            options = dict(mask=torch.zeros(1, 1, 1, length, dtype=torch.bool))
        with Sizes() as sizes:
            out = cuda.attention(*leaves, prepare(*leaves, dropout_p=dropout, **options))
            torch.autograd.grad(out, leaves, dout)
        largest.append(sizes.largest)
    # Twice the length, at most twice the memory; a bias would take four times: 16 MiB.
    assert largest[1] <= 2 * largest[0] and largest[1] <= 8 * 2**20
