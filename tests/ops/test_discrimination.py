"""Every operator, backend and dtype: right results are within the bound of `tests.harness`, wrong ones are not."""

from __future__ import annotations

import contextlib
import importlib
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mindspeed_lite.ops import dispatch
from tests.harness import cuda_twin, errors
from tests.harness.compare import one_thread
from tests.harness.drawn_calls import PROBLEMS, Draw, Problem, output_gradients

# Triton's interpreter takes a second for some calls.
DRAWS = {"reference": 40, "cpu": 60, "npu": 40, "cuda": 4}
REJECTED = 0.99
# The kernels of NPUs take factors and partial results in the inputs' dtype: so many roundings more.
NPU_ROUNDINGS = {"activation": 2}


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

        def backend(case: Any, tensors: Any) -> Any:
            chosen.append(case)
            return module

        patch.setattr(found, "_backend", backend)
        yield
        assert chosen


def results(problem: Problem, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Outputs and gradients by name, computed from copies of the inputs in `dtype` (their own by default)."""
    count = problem.differentiable if problem.differentiable >= 0 else len(problem.inputs)
    leaves = [t.detach().to(dtype or t.dtype).clone().requires_grad_(i < count) for i, t in enumerate(problem.inputs)]
    found = problem.call(*leaves)
    outputs: dict[str, torch.Tensor] = found if isinstance(found, dict) else {"output": found}
    if count:
        sent = output_gradients(list(outputs.values()))
        gradients = torch.autograd.grad(list(outputs.values()), leaves[:count], sent)
        gradients = tuple(each.to_dense() if each.is_sparse else each for each in gradients)
        named = {f"gradient of input {number}": each for number, each in enumerate(gradients, 1)}
        outputs = {**outputs, **named}
    return {name: each.detach() for name, each in outputs.items()}


def coarser(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    return a if torch.finfo(a).eps > torch.finfo(b).eps else b


def backends() -> Iterator[Any]:
    for name, (operator, _) in PROBLEMS.items():
        for backend in ("reference", *dispatch.operator(operator).backends):
            # Triton's interpreter cuts bfloat16 off where hardware rounds it.
            dtypes = (torch.float16 if backend == "cuda" else torch.bfloat16, torch.float32)
            for dtype in dtypes:
                yield pytest.param(name, backend, dtype, id=f"{name}-{backend}-{str(dtype).removeprefix('torch.')}")


@pytest.mark.parametrize(("name", "backend", "dtype"), backends())
@pytest.mark.usefixtures("npu_twin", "triton_runs")
def test_right_results_are_accepted_and_wrong_ones_are_not(name: str, backend: str, dtype: torch.dtype) -> None:
    operator, draw_problem = PROBLEMS[name]
    if backend != "cuda" and dispatch.operator(operator).unusable(backend):
        pytest.skip(str(dispatch.operator(operator).unusable(backend)))
    if backend == "cuda" and torch.cuda.is_available():
        pytest.skip("Triton's kernels are not interpreted here, and take no tensors of the CPU")
    tried: dict[tuple[str, str], int] = {}
    accepted: dict[tuple[str, str], int] = {}
    served, refusal = 0, ""

    def too_often() -> dict[tuple[str, str], str]:
        limit = 1 - REJECTED
        return {key: f"{accepted[key]} of {tried[key]}" for key in tried if accepted[key] > limit * tried[key]}

    for number in range(5 * DRAWS[backend]):
        if number >= DRAWS[backend] and not too_often():
            break  # one of a few says little of one in a hundred: more are drawn then
        draw = Draw(zlib.crc32(f"{name} {number}".encode()), dtype)
        problem = draw_problem(draw)
        with one_thread():
            try:
                with on(operator, backend):
                    got = results(problem, None)
            except RuntimeError as error:
                if "is forced and cannot serve" not in str(error):
                    raise
                refusal = str(error)
                continue
            with dispatch.force(operator, dispatch.REFERENCE):
                exact = results(problem, torch.float64)
        served += 1
        for each, truth in exact.items():
            if each in problem.skips:
                continue
            ours = got[each]
            rounded_to = coarser(dtype, ours.dtype) if problem.rounds_within else ours.dtype
            if ours.dtype == torch.float64:
                rounded_to = torch.float32  # the difference of two results
            roundings = problem.roundings + (NPU_ROUNDINGS.get(operator, 1) if backend == "npu" else 0)
            allowed = errors.bound(rounded_to, problem.terms, roundings)
            magnitude = problem.magnitudes.get(each)
            errors.assert_within(ours, truth, allowed, magnitude, f"draw {number}, {each}")
            for kind, wrong in errors.mutations(ours, draw.generator):
                tried[each, kind] = tried.get((each, kind), 0) + 1
                accepted[each, kind] = accepted.get((each, kind), 0) + errors.is_within(
                    wrong, truth, allowed, magnitude
                )
    if not served:
        pytest.skip(f"{backend} serves no case of these: {refusal}")
    assert served >= DRAWS[backend] // 4
    assert not too_often(), f"wrong results that the bound accepts: {too_often()}"


def test_what_is_no_number_or_of_another_shape_is_wrong() -> None:
    exact = torch.ones(4, dtype=torch.float64)
    assert errors.is_within(torch.ones(4), exact, 1e-7)
    assert not errors.is_within(torch.tensor([1, 1, 1, torch.nan]), exact, 1.0)
    assert not errors.is_within(torch.ones(2, 2), exact, 1.0)
    assert not errors.is_within(torch.tensor([1e-3, 0, 0, 0]), 0 * exact, 1e-4)
    assert all(errors.bound(torch.bfloat16, 10_000, roundings) < 0.01 for roundings in range(1, 6))
