"""l2norm: every path against float64, whatever the shapes, and the same bits whatever the threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_lite.ops import native
from mindspeed_lite.ops.dispatch import selected
from mindspeed_lite.ops.l2norm import OPERATOR, cpu, cuda, l2norm, reference, why_not

PATHS: dict[str, Callable[..., torch.Tensor]] = {
    "dispatched": l2norm,
    "cuda, on CPU tensors": cuda.l2norm,
    "reference": reference.l2norm,
}


def megatrons(tensors: list[torch.Tensor]) -> torch.Tensor:
    """What it stands in for."""
    return torch.norm(torch.tensor([torch.norm(tensor) for tensor in tensors]))


def exact(tensors: list[torch.Tensor]) -> float:
    return torch.cat([tensor.double().flatten() for tensor in tensors]).norm().item()


@pytest.mark.parametrize("path", PATHS)
def test_it_is_the_norm_of_all_elements_together(path: str) -> None:
    found = PATHS[path]([torch.tensor([[3.0, 0.0]]), torch.tensor([4.0]), torch.zeros(0), torch.tensor(12.0)])
    assert found.shape == () and found.dtype == torch.float32 and found.item() == 13.0


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(
        st.one_of(st.integers(0, 50), st.sampled_from([32767, 32768, 32769, 100_000])), min_size=1, max_size=5
    ),
    dtypes=st.sampled_from([[torch.float32], [torch.bfloat16], [torch.float16], [torch.float32, torch.bfloat16]]),
    magnitude=st.sampled_from([1e-4, 1.0, 30.0]),
    path=st.sampled_from(sorted(PATHS)),
    seed=st.integers(0, 1000),
)
def test_error_is_not_above_megatrons(
    sizes: list[int], dtypes: list[torch.dtype], magnitude: float, path: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        (torch.randn(size, generator=generator) * magnitude).to(dtypes[place % len(dtypes)])
        for place, size in enumerate(sizes)
    ]
    if path.startswith("cuda") and len({tensor.dtype for tensor in tensors}) > 1:
        path = "dispatched"
    truth = exact(tensors)
    allowed = abs(megatrons([tensor.float() for tensor in tensors]).item() - truth) + 1e-6 * truth
    assert abs(PATHS[path](tensors).item() - truth) <= allowed


def test_the_compiled_sum_loses_nothing_of_a_long_list() -> None:
    tensors = [torch.full((1_000_003,), 0.1) for _ in range(3)]
    truth = exact(tensors)
    assert l2norm(tensors).item() == torch.tensor(truth).float().item()


def test_extreme_values() -> None:
    assert l2norm([torch.tensor([1e19, 1e19])]).item() == pytest.approx(2**0.5 * 1e19)
    assert l2norm([torch.tensor([1e-30])]).item() == pytest.approx(1e-30)
    assert l2norm([torch.tensor([float("inf")]), torch.ones(3)]).item() == float("inf")
    assert l2norm([torch.ones(3), torch.tensor([float("nan"), float("inf")])]).isnan()
    assert l2norm([torch.zeros(0)]).item() == 0.0


def test_threads_change_no_bit() -> None:
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (300_001, 5, 90_000)]
    before = torch.get_num_threads()
    try:
        found = set()
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.add(l2norm(tensors).item())
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


def test_what_the_kernel_cannot_take_goes_to_the_reference_with_a_reason() -> None:
    view = torch.randn(6, 4).t()
    assert why_not([view]) == ["a tensor is not contiguous"]
    assert l2norm([view]).item() == pytest.approx(exact([view]), rel=1e-6)
    assert why_not([torch.ones(2), torch.ones(2).bfloat16()]) == ["tensors of several dtypes"]
    assert why_not([torch.ones(2).half()]) == ["dtype torch.float16: the kernel takes float32 and bfloat16"]
    assert l2norm([torch.ones(2, dtype=torch.float64)]).dtype == torch.float64
    with pytest.raises(ValueError, match="at least one"):
        l2norm([])


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    native._compiler.cache_clear()
    monkeypatch.setattr(cpu, "_lib", native.Library(cpu._lib.source, cpu._lib.functions))
    OPERATOR._chosen.clear()
    yield
    monkeypatch.undo()
    native._compiler.cache_clear()
    OPERATOR._chosen.clear()


def test_without_a_compiler_the_reference_serves(no_compiler: None) -> None:
    tensors = [torch.randn(100), torch.randn(3)]
    assert "no C++ compiler" in why_not(tensors)[0]
    assert l2norm(tensors).item() == pytest.approx(exact(tensors), rel=1e-6)


def test_on_an_npu_the_reference_is_the_backend(npu_twin: list[Any]) -> None:
    assert selected("l2norm", "npu") == ("reference", ())
