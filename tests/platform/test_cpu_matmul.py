"""Products of 16-bit matrices in fp32: every operator against float64, and PyTorch's own kernels for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_lite.platform import DeviceError, cpu_matmul

DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def slow_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the processor had no 16-bit products, and nobody had installed others."""
    monkeypatch.delenv(cpu_matmul.CPU_MATMUL_VARIABLE, raising=False)
    for name in ("has_bf16", "has_fp16"):
        monkeypatch.setattr(cpu_matmul, name, lambda: False)
    assert not cpu_matmul.widened()


@pytest.fixture
def installed(slow_processor: None) -> Iterator[None]:
    undo = cpu_matmul.install()
    yield
    undo()
    assert not cpu_matmul.widened()


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def forms(matrices: tuple[torch.Tensor, torch.Tensor], added: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """What PyTorch multiplies `matrices` with: a new result, one in memory that is there, one on top of `added`."""
    a, b = matrices
    out = torch.full_like(added, float("nan"))
    some = {"beta": 0.5, "alpha": -2.0}
    if a.dim() == 2:
        return {
            "mm": lambda: torch.mm(a, b),
            "mm.out": lambda: torch.mm(a, b, out=out),
            "addmm": lambda: torch.addmm(added, a, b, **some),
            "addmm.out": lambda: torch.addmm(added, a, b, out=out),
            "addmm of a row": lambda: torch.addmm(added[0], a, b),
            "addmm_": lambda: added.clone().addmm_(a, b, **some),
            "addmm_ of nothing": lambda: out.clone().addmm_(a, b, beta=0),
            "linear": lambda: torch.nn.functional.linear(a, b.t(), added[0]),
        }
    return {
        "bmm": lambda: torch.bmm(a, b),
        "bmm.out": lambda: torch.bmm(a, b, out=out),
        "baddbmm": lambda: torch.baddbmm(added, a, b, **some),
        "baddbmm.out": lambda: torch.baddbmm(added, a, b, out=out),
        "baddbmm_": lambda: added.clone().baddbmm_(a, b, **some),
        "baddbmm_ of nothing": lambda: out.clone().baddbmm_(a, b, beta=0),
        "matmul": lambda: a @ b,
    }


def compare(a: torch.Tensor, b: torch.Tensor, added: torch.Tensor) -> None:
    """Every form with other kernels is at most as far from float64 as with PyTorch's, and has its shape and dtype."""
    # Copies: two forms write into the same memory.
    exact = {name: run().clone() for name, run in forms((a.double(), b.double()), added.double()).items()}
    torchs = {name: run().clone() for name, run in forms((a, b), added).items()}
    undo = cpu_matmul.install()
    try:
        ours = {name: run().clone() for name, run in forms((a, b), added).items()}
    finally:
        undo()
    for name, truth in exact.items():
        assert ours[name].dtype == a.dtype and ours[name].shape == torchs[name].shape, name
        # Rounding to nearest of a sum in fp32: half a unit of the largest in the last place, and the sum's own error.
        bound = (torchs[name].double() - truth).abs().max() if truth.numel() else torch.tensor(0.0)
        unit = torch.finfo(a.dtype).eps * truth.abs().max() if truth.numel() else torch.tensor(0.0)
        assert ((ours[name].double() - truth).abs() <= torch.maximum(bound, 0.51 * unit)).all(), name


@settings(max_examples=25)
@given(
    dtype=st.sampled_from(DTYPES),
    batch=st.integers(0, 3),
    m=st.integers(1, 40),
    k=st.integers(0, 70),
    n=st.integers(1, 40),
    strided=st.booleans(),
)
def test_every_form_is_as_exact_as_pytorchs(
    dtype: torch.dtype, batch: int, m: int, k: int, n: int, strided: bool
) -> None:
    lead = (batch,) if batch else ()
    a, b = normal(*lead, m, k, dtype=dtype), normal(*lead, k, n, dtype=dtype, seed=1)
    if strided:
        a, b = a.mT.contiguous().mT, b.mT.contiguous().mT
    compare(a, b, normal(*lead, m, n, dtype=dtype, seed=2))


def test_results_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_matmul, "_PART", 64)
    compare(normal(37, 11), normal(11, 13), normal(37, 13))
    compare(normal(5, 7, 11), normal(5, 11, 13), normal(5, 7, 13))


def test_gradients_and_compiled_graphs_are_reached(installed: None) -> None:
    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w.t()).float().square().sum()

    found = []
    for run in (loss, torch.compile(loss, backend="aot_eager")):
        x, w = normal(33, 21).requires_grad_(), normal(17, 21).requires_grad_()
        run(x, w).backward()
        found.append((x.grad, w.grad))
    x, w = normal(33, 21).double().requires_grad_(), normal(17, 21).double().requires_grad_()
    loss(x, w).backward()
    for gradients in found:
        for ours, exact in zip(gradients, (x.grad, w.grad), strict=True):
            assert ours is not None and exact is not None
            assert (ours.double() - exact).abs().max() <= 2 * torch.finfo(torch.bfloat16).eps * exact.abs().max()


def test_everything_else_is_pytorchs_own() -> None:
    a, b = normal(9, 20, dtype=torch.float32), normal(20, 6, dtype=torch.float32)
    products = (lambda: torch.mm(a, b), lambda: torch.addmm(b[0], a, b), lambda: (a * 8).long() @ (b * 8).long())
    pytorchs = [product() for product in products]
    undo = cpu_matmul.install()
    ours = [product() for product in products]
    undo()
    assert all(map(torch.equal, ours, pytorchs))


def test_only_what_the_processor_lacks_is_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_matmul, "has_bf16", lambda: True)
    undo = cpu_matmul.install()
    assert cpu_matmul.widened() == {torch.float16}
    undo()
    monkeypatch.setattr(cpu_matmul, "has_fp16", lambda: True)
    cpu_matmul.install()
    assert not cpu_matmul.widened()


def test_the_variable_leaves_pytorch_alone_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu_matmul.CPU_MATMUL_VARIABLE, "torch")
    cpu_matmul.install()
    assert not cpu_matmul.widened()
    monkeypatch.setenv(cpu_matmul.CPU_MATMUL_VARIABLE, "fast")
    with pytest.raises(DeviceError, match=r"MINDSPEED_LITE_CPU_MATMUL=fast.*fp32 or torch"):
        cpu_matmul.install()
