"""Every operator, backend and dtype against float64: right results are accepted, and what is made wrong of them is not.

Shapes are those of `cases.py`. What a result may be off is what the definition is off in the same dtype.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mindspeed_lite.bench.operators.equivalence import outcome, output_gradient
from mindspeed_lite.ops import dispatch
from mindspeed_lite.ops.discovery import cases
from tests.harness import errors, matrix
from tests.harness.compare import one_thread
from tests.ops import cuda_twin

# Floating-point operations of what takes milliseconds.
MOST_FLOPS = 1 << 27
# Sums in fp32 in another order.
OTHER_ORDER = 4 * torch.finfo(torch.float32).eps


def in_float64(tensor: torch.Tensor) -> torch.Tensor:
    moved = tensor.detach().cpu()
    return moved.double().requires_grad_(tensor.requires_grad) if moved.is_floating_point() else moved


def wide_layer_norm(
    x: torch.Tensor, shape: torch.Size, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """PyTorch's operator as torch_npu computes it: in fp32, also the gradients of weight and bias."""
    wide = [each.float() for each in (x, weight, bias)]
    return torch.layer_norm(wide[0], shape, wide[1], wide[2], eps).to(x.dtype)


def add_product(main_grad: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """aten::addmm.dtype_out, which PyTorch has for CUDA alone."""
    return main_grad.add_(dy.float().t() @ x.float())


@contextlib.contextmanager
def on(operator: str, backend: str) -> Iterator[None]:
    """Within the block `operator` runs on `backend`, on tensors of the CPU.

    Triton kernels run interpreted; of PyTorch's own operators for a device stand-ins are called.
    """
    with pytest.MonkeyPatch.context() as patch:
        if backend != "cuda":
            if (operator, backend) == ("layer_norm", "npu"):
                patch.setattr(torch.nn.functional, "layer_norm", wide_layer_norm)
            with dispatch.force(operator, backend):
                yield
            return
        found = dispatch.operator(operator)
        module = importlib.import_module(found.backends["cuda"])
        if operator == "attention":
            kernels = importlib.import_module(f"{dispatch.OPERATORS[operator]}.cuda_kernels")
            patch.setattr(kernels, "_aten", cuda_twin.Aten())
            patch.setattr(kernels, "_flash_missing", lambda: ())
        if operator == "accumulate_wgrad":
            patch.setattr(module, "_add_product", add_product)
        chosen: list[Any] = []

        def backend_of(case: Any, tensors: Any) -> Any:
            chosen.append(case)
            return module

        patch.setattr(found, "_backend", backend_of)
        yield
        assert chosen


def shapes(operator: str, backend: str) -> Iterator[str]:
    """Triton's interpreter takes a second for large ones: a quarter of each size."""

    def quarter(size: re.Match[str]) -> str:
        return str(int(size[0]) // 4) if int(size[0]) >= 24 else size[0]

    for text in cases(operator).checked(backend):
        yield re.sub(r"\d+", quarter, text) if backend == "cuda" else text


def rows() -> Iterator[Any]:
    for operator in dispatch.OPERATORS:
        for backend in dispatch.operator(operator).backends:
            # Triton's interpreter cuts bfloat16 off where hardware rounds it.
            for dtype in (torch.float16 if backend == "cuda" else torch.bfloat16, torch.float32):
                # Triton's interpreter is slow, and models train in 16 bits.
                marks = matrix.whole if (backend, dtype) == ("cuda", torch.float32) else ()
                yield pytest.param(operator, backend, dtype, id=f"{operator}-{backend}-{str(dtype)[6:]}", marks=marks)


@pytest.mark.parametrize(("operator", "backend", "dtype"), rows())
@pytest.mark.usefixtures("npu_twin", "triton_runs")
def test_right_results_are_accepted_and_wrong_ones_are_not(operator: str, backend: str, dtype: torch.dtype) -> None:
    if backend != "cuda" and dispatch.operator(operator).unusable(backend):
        pytest.skip(str(dispatch.operator(operator).unusable(backend)))
    if backend == "cuda" and torch.cuda.is_available():
        pytest.skip("Triton's kernels are not interpreted here, and take no tensors of the CPU")
    generator = torch.Generator().manual_seed(zlib.crc32(f"{operator} {backend}".encode()))
    served, refusal, missed = 0, "", []
    for text in shapes(operator, backend):
        problem = cases(operator).problem(text, "cpu", dtype)
        if problem.is_random or (problem.both or problem.forward).flops > MOST_FLOPS:
            continue
        inputs, function = problem.make(), problem.contenders[0].load()
        with one_thread():
            try:
                with on(operator, backend):
                    got = outcome(function, inputs)
            except RuntimeError as error:
                if backend == "npu" or "is forced and cannot serve" not in str(error):
                    raise
                refusal = str(error)
                continue
            gradient = output_gradient(got["output"])
            with dispatch.force(operator, dispatch.REFERENCE):
                plain = outcome(function, inputs, gradient)
                exact = outcome(function, [in_float64(each) for each in inputs], gradient.double())
        served += 1
        for name, truth in exact.items():
            ours = got[name]
            allowed = 1.5 * errors.error(plain[name], truth) + torch.finfo(ours.dtype).eps / 2 + OTHER_ORDER
            errors.assert_within(ours, truth, allowed, name=f"{text}, {name}")
            wrong = errors.mutations(ours, generator)
            missed += [f"{text}, {name}: {kind}" for kind, each in wrong if errors.is_within(each, truth, allowed)]
    if not served:
        pytest.skip(f"{backend} serves no case of these: {refusal}")
    assert not missed


def test_what_is_no_number_or_of_another_shape_is_wrong() -> None:
    exact = torch.ones(4, dtype=torch.float64)
    assert errors.is_within(torch.ones(4), exact, 1e-7)
    assert not errors.is_within(torch.tensor([1, 1, 1, torch.nan]), exact, 1.0)
    assert not errors.is_within(torch.ones(2, 2), exact, 1.0)
    assert not errors.is_within(torch.tensor([1e-3, 0, 0, 0]), 0 * exact, 1e-4)
    assert all(errors.bound(torch.bfloat16, 10_000, roundings) < 0.01 for roundings in range(1, 6))
