"""l2norm on CPU: the compiled kernel adds up in PyTorch's order, or is not used."""

from __future__ import annotations

import pytest
import torch

from mindspeed_lite.ops.l2norm import cpu, l2norm, reference

compiled = pytest.mark.skipif(cpu._lib.unusable() is not None, reason=str(cpu._lib.unusable()))


def order() -> cpu._Order:
    found = cpu._order(torch.backends.cpu.get_cpu_capability())
    assert found is not None
    return found


def made(sizes: list[int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) * 10.0 ** (seed % 5 - 2) for size in sizes]


@compiled
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_norm_of_every_tensor_has_pytorchs_bits(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for seed, sizes in enumerate([[1, 0, 7, 8, 9], [70_001], [5000, 3, 4096, 8191, 40_000, 12], [33] * 50]):
            tensors = made(sizes, seed)
            expected = torch.stack([torch.linalg.vector_norm(each) for each in tensors])
            assert torch.equal(cpu._norms(tensors, order()), expected)
            assert torch.equal(l2norm(tensors), reference.l2norm(tensors))
    finally:
        torch.set_num_threads(before)


@compiled
def test_another_order_has_other_bits() -> None:
    tensors = made([30_000] * 40)
    expected = torch.stack([torch.linalg.vector_norm(each) for each in tensors])
    right = order()
    for wrong in (right._replace(lanes=24 - right.lanes), right._replace(fused=not right.fused)):
        assert not torch.equal(cpu._norms(tensors, wrong), expected)


@pytest.mark.parametrize("reason", ["no known order", "strides", "dtype"])
def test_what_the_kernel_does_not_serve_goes_to_pytorch(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = made([40, 300, 5000])
    if reason == "no known order":
        monkeypatch.setattr(cpu, "_order", lambda capability: None)
    elif reason == "strides":
        tensors[1] = torch.randn(30, 20).t()
    else:
        tensors[2] = tensors[2].bfloat16()
    monkeypatch.setattr(cpu, "_norms", lambda *given: pytest.fail("the kernel was called"))
    assert torch.equal(l2norm(tensors), reference.l2norm(tensors))
