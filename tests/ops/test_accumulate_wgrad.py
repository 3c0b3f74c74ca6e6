"""accumulate_wgrad: its reference against autograd, and every other path against the reference in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mindspeed_lite.ops.accumulate_wgrad import Case, accumulate_wgrad, cuda, reference
from mindspeed_lite.ops.dispatch import force
from tests.harness.compare import error

HALF = (torch.bfloat16, torch.float16)


def make(
    rows: int, n: int, k: int, dtype: torch.dtype, main_dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """main_grad, dy, x"""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((n, k), (rows, n), (rows, k))
    main_grad, dy, x = (torch.randn(shape, generator=generator) for shape in shapes)
    return main_grad.to(main_dtype), dy.to(dtype), x.to(dtype)


def exactly(main_grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return reference.accumulate_wgrad(main_grad.double(), dy.double(), x.double())


def unfused(main_grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What is replaced: autograd's product and the addition of a gradient hook."""
    return main_grad.clone().add_(dy.t() @ x)


def on(backend: str, main_grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with force("accumulate_wgrad", backend):
        return accumulate_wgrad(main_grad.clone(), dy, x)


def test_reference_is_the_formula() -> None:
    main_grad = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, -1.0]])
    dy, x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    expected = torch.tensor([[2.0, 5.0, 7.0], [2.0, 4.0, 5.0]])
    assert torch.equal(reference.accumulate_wgrad(main_grad, dy, x), expected)


def test_it_is_the_gradient_of_a_linear_layer() -> None:
    main_grad, dy, x = make(5, 3, 4, torch.float64, torch.float64)
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    torch.nn.functional.linear(x, weight).backward(dy)
    expected = main_grad + weight.grad
    torch.testing.assert_close(accumulate_wgrad(main_grad, dy, x), expected)


def test_it_writes_in_place_and_says_so_to_autograd() -> None:
    main_grad, dy, x = make(40, 33, 17, torch.bfloat16)
    before, version = main_grad.clone(), main_grad._version
    assert accumulate_wgrad(main_grad, dy, x) is main_grad
    assert not torch.equal(main_grad, before) and main_grad._version > version
    assert not main_grad.requires_grad


def test_the_reference_is_bitwise_what_megatron_computes_without_the_fusion() -> None:
    main_grad, dy, x = make(64, 48, 32, torch.bfloat16)
    assert torch.equal(on("reference", main_grad, dy, x), unfused(main_grad, dy, x))


def test_what_does_not_fit_is_an_error() -> None:
    main_grad, dy, x = make(5, 4, 3, torch.bfloat16)
    for wrong in ((main_grad.t(), dy, x), (main_grad, dy[:4], x), (main_grad, dy[None], x), (main_grad[0], dy, x)):
        with pytest.raises(ValueError, match="want main_grad"):
            accumulate_wgrad(*wrong)
    with pytest.raises(ValueError, match="want one dtype"):
        accumulate_wgrad(main_grad, dy.float(), x)


@pytest.mark.parametrize("mode", ["fake", "compiled"])
def test_tensors_without_memory_take_the_plain_way(mode: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    if mode == "fake":
        with FakeTensorMode():
            main_grad, dy, x = torch.zeros(8, 4), *(torch.zeros(6, n, dtype=torch.bfloat16) for n in (8, 4))
            assert accumulate_wgrad(main_grad, dy, x) is main_grad
        return
    tensors = make(40, 30, 20, torch.bfloat16)
    step = torch.compile(accumulate_wgrad, backend="eager")
    assert torch.equal(step(tensors[0].clone(), *tensors[1:]), unfused(*tensors))


# ---- CUDA ----


def test_the_cuda_call_fits_the_schema() -> None:
    """Without a GPU all there is to see is the operator's schema: PyTorch's meta kernel for it is broken."""
    schema = torch.ops.aten.addmm.dtype_out._schema
    assert [each.name for each in schema.arguments] == "self mat1 mat2 out_dtype beta alpha out".split()
    assert {each.name: each.default_value for each in schema.arguments}["beta"] == 1
    if torch.version.cuda is not None:
        assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::addmm.dtype_out", "CUDA")


def test_an_older_torch_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.aten, "addmm", None)
    (reason,) = cuda.supported(Case("cuda", torch.bfloat16, torch.float32, True))
    assert "does not add a 16-bit product to an fp32 matrix" in reason


def _fails(*_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")


@pytest.mark.parametrize(
    ("product", "words"),
    [
        (lambda main, dy, x: main.add_(dy.float().t() @ x.float()), ""),
        (lambda main, dy, x: main.copy_(dy.float().t() @ x.float()), "wrongly"),
        (lambda main, dy, x: main + dy.float().t() @ x.float(), "wrongly"),
        (_fails, "CUBLAS_STATUS_NOT_SUPPORTED"),
    ],
)
def test_the_cuda_call_is_tried_by_its_value(
    product: Callable[..., torch.Tensor], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product that forgets the accumulation buffer, or writes elsewhere, raises nothing."""
    monkeypatch.setattr(cuda, "_add_product", product)
    found = cuda._wrong_sums.__wrapped__(torch.bfloat16, "cpu")
    assert words in found[0] if words else found == ()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", HALF)
def test_cuda_accumulates_in_fp32(dtype: torch.dtype) -> None:
    tensors = make(300, 130, 70, dtype)
    got = on("cuda", *(each.cuda() for each in tensors)).cpu()
    assert error(got, exactly(*tensors)) <= 4 * torch.finfo(torch.float32).eps


# ---- NPU, on the emulation of its documentation ----


@pytest.mark.usefixtures("npu_twin")
def test_npu_of_one_dtype() -> None:
    tensors = make(6, 5, 4, torch.float32, torch.float32)
    assert error(on("npu", *tensors), exactly(*tensors)) < 1e-6
