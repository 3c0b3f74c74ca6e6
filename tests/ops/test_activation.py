"""activation: its reference against the formulas, and every other path against the reference in float64."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from mindspeed_lite.ops.activation import KINDS, OPERATOR, ActivationSpec, activation, cpu, reference
from mindspeed_lite.ops.dispatch import force
from tests.harness.compare import error, forward_backward, one_thread
from tests.harness.errors import bound
from tests.harness.processes import clean_environment
from tests.harness.reasons import why_not_of
from tests.harness.triton_compile import compile_sm90

from . import twin

why_not = why_not_of(activation)


def _unpacked(backend):
    """A backend's function with the operator's signature."""

    def run(x, kind, bias=None, weights=None, linear_offset=0.0, clamp=None):
        return backend(x, bias, weights, ActivationSpec(kind, linear_offset, clamp))

    return run


definition = _unpacked(reference.definition)

cuda = pytest.importorskip("mindspeed_lite.ops.activation.cuda", reason="Triton is not installed")
compiled = pytest.mark.skipif(cpu._lib.unusable() is not None, reason=str(cpu._lib.unusable()))
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BACKENDS = {
    "reference": definition,
    "recompute": _unpacked(reference.activation),
    "cpu": activation,
    "triton": _unpacked(cuda.activation),
}
backends = pytest.mark.parametrize("backend", BACKENDS)
kinds = pytest.mark.parametrize("kind", KINDS)


def tensors(
    kind: str, rows: tuple[int, ...], half: int, dtype: torch.dtype, bias: bool, weights: bool, scale: float = 2.0
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """[x, bias, weights] as far as wanted, and the output's gradient."""
    generator = torch.Generator().manual_seed(half + 7 * len(rows))
    width = 2 * half if kind in reference.GATED else half
    inputs = [(scale * torch.randn(*rows, width, generator=generator)).to(dtype)]
    if bias:
        inputs.append(torch.randn(width, generator=generator).to(dtype))
    if weights:
        inputs.append(torch.rand(*rows, 1, generator=generator))
    return inputs, torch.randn(*rows, half, generator=generator).to(dtype)


def call(
    function: Callable[..., torch.Tensor], kind: str, bias: bool, weights: bool, **options: Any
) -> Callable[..., torch.Tensor]:
    """`function` of as many tensors as there are."""

    def run(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        given = iter(rest)
        return function(x, kind, next(given) if bias else None, next(given) if weights else None, **options)

    return run


# ---- what it is ----


def test_the_reference_is_the_formula() -> None:
    x = torch.tensor([[0.5, -2.0, 3.0, 4.0]], dtype=torch.float64)
    bias = torch.tensor([0.5, 1.0, -1.0, 0.0], dtype=torch.float64)
    weights = torch.tensor([[0.5]], dtype=torch.float64)

    def sigmoid(t: float) -> float:
        return 1 / (1 + math.exp(-t))

    def gelu(t: float) -> float:
        return t / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (t + 0.044715 * t**3)))

    # x + bias is 1, -1 | 2, 4
    expected = {
        "swiglu": [sigmoid(1) * 2, -sigmoid(-1) * 4],
        "geglu": [gelu(1) * 2, gelu(-1) * 4],
        "quick_geglu": [sigmoid(1.702) * 2, -sigmoid(-1.702) * 4],
        "gelu": [gelu(1), gelu(-1), gelu(2), gelu(4)],
        "squared_relu": [1.0, 0.0, 4.0, 16.0],
    }
    for kind in KINDS:
        want = torch.tensor([expected[kind]], dtype=torch.float64)
        torch.testing.assert_close(definition(x, kind, bias), want)
        torch.testing.assert_close(definition(x, kind, bias, weights), want / 2)
    limited = definition(x, "swiglu", bias, linear_offset=1.0, clamp=0.5)
    want = torch.tensor([[0.5 * sigmoid(0.5) * 1.5, -sigmoid(-1) * 1.5]], dtype=torch.float64)
    torch.testing.assert_close(limited, want)


@kinds
@backends
def test_gradients_of_the_definition(kind: str, backend: str) -> None:
    if backend == "triton":
        pytest.skip("the kernel has no float64")
    inputs, _ = tensors(kind, (2, 3), 4, torch.float64, True, True)
    leaves = [t.double().requires_grad_() for t in inputs]
    options = {"linear_offset": 0.5, "clamp": 2.5} if kind in reference.GATED else {}
    with one_thread():
        assert gradcheck(call(BACKENDS[backend], kind, True, True, **options), leaves)


# ---- how exact it is ----


def replaced(x: torch.Tensor, kind: str, bias: Any = None, weights: Any = None) -> torch.Tensor:
    """What Megatron computes eagerly: every step in its tensors' own dtype."""
    y = x if bias is None else x + bias
    if kind in reference.GATED:
        gate, up = y.chunk(2, -1)
        y = reference.GATED[kind](gate) * up
    else:
        y = reference.PLAIN[kind](y)
    return y if weights is None else (y * weights).to(x.dtype)


def sums(
    kind: str, inputs: list[torch.Tensor], dy: torch.Tensor, dx: torch.Tensor, bias: bool, weights: bool
) -> Iterator[torch.Tensor]:
    """For the gradients of bias and weights, which are sums, in that order: the same sums of the terms' magnitudes."""
    if bias:
        yield dx.double().abs().flatten(0, -2).sum(0)
    if weights:
        wide = [t.double() for t in inputs[: 1 + bias]]
        yield (dy.double() * definition(wide[0], kind, *wide[1:])).abs().sum(-1, keepdim=True)


def not_worse(
    backend: str, kind: str, rows: tuple[int, ...], half: int, dtype: torch.dtype, bias: bool, weights: bool,
    scale: float,
) -> None:  # fmt: skip
    inputs, dy = tensors(kind, rows, half, dtype, bias, weights, scale)
    with one_thread():
        exact = forward_backward(call(definition, kind, bias, weights), inputs, dy, torch.float64)
        theirs = forward_backward(call(replaced, kind, bias, weights), inputs, dy)
        ours = forward_backward(call(BACKENDS[backend], kind, bias, weights), inputs, dy)
    summed = [None, None, *sums(kind, inputs, dy, exact[1], bias, weights)]
    for got, want, truth, terms in zip(ours, theirs, exact, summed, strict=True):
        assert got.dtype == want.dtype
        # One rounding to the result's dtype is free, which few elements do not average out (and Triton's interpreter
        # cuts to 16 bit where a GPU rounds); in fp32 so are the roundings of sums in another order.
        slack = (0.5 if backend != "triton" else 1) * torch.finfo(got.dtype).eps + 4 * torch.finfo(torch.float32).eps
        if terms is not None and truth.norm():
            # Where terms cancel, the roundings of their sum are large beside what is left of it.
            slack += 4 * torch.finfo(torch.float32).eps * float(terms.norm() / truth.norm())
        assert error(got, truth) <= max(error(want, truth), slack), (kind, truth.shape)


CALLS = {
    "kind": st.sampled_from(KINDS),
    "rows": st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
    "half": st.sampled_from([1, 3, 17, 64, 65, 130, 200]),
    "dtype": st.sampled_from([torch.bfloat16, torch.float32]),
    "bias": st.booleans(),
    "weights": st.booleans(),
    "scale": st.sampled_from([0.1, 1.0, 6.0]),
}


@settings(max_examples=60)
@given(**CALLS)
@example(kind="swiglu", rows=(1, 1, 1), half=65, dtype=torch.float32, bias=True, weights=True, scale=1.0)
@pytest.mark.parametrize("backend", ["cpu", "recompute"])
def test_error_is_not_above_that_of_the_path_it_replaces(backend: str, **drawn: Any) -> None:
    not_worse(backend, **drawn)


@settings(max_examples=8)  # the interpreter takes its time
@given(**CALLS)
def test_error_of_the_triton_kernel_is_not_above_that_of_the_path_it_replaces(**drawn: Any) -> None:
    not_worse("triton", **drawn)


@compiled
def test_a_16_bit_result_is_the_nearest_number() -> None:
    """One rounding, where the path it replaces has several."""
    inputs, dy = tensors("gelu", (64,), 96, torch.bfloat16, True, False)
    exact = forward_backward(call(definition, "gelu", True, False), inputs, dy, torch.float64)
    got = forward_backward(call(activation, "gelu", True, False), inputs, dy)
    for ours, truth in zip(got, exact, strict=True):
        nearest = truth.to(ours.dtype)
        # Values halfway between two numbers may go either way by their fp32 error.
        assert (ours != nearest).double().mean() < 0.01 or error(ours, truth) < 1e-6


@compiled
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_extreme_values_come_out_as_from_the_definition(kind: str, dtype: torch.dtype) -> None:
    points = [0.0, -0.0, 1e-30, -1e-30, 20.0, -20.0, 88.0, -88.0, 100.0, -100.0, 1e4, -1e4, 1e18, -1e18]
    points += [math.inf, math.nan]
    gate = torch.tensor(points).to(dtype)
    x = torch.cat([gate, torch.ones_like(gate)]) if kind in reference.GATED else gate
    dy = torch.ones_like(gate)
    exact = forward_backward(call(definition, kind, False, False), [x], dy, torch.float64)
    got = {name: forward_backward(call(BACKENDS[name], kind, False, False), [x], dy) for name in ("cpu", "triton")}
    for name, results in got.items():
        for ours, truth in zip(results, exact, strict=True):
            want = truth.to(dtype)
            finite = want.isfinite()
            # An exponent of up to 88, rounded to fp32, moves its power by up to 88 eps.
            rtol = 2 * torch.finfo(dtype).eps + 88 * torch.finfo(torch.float32).eps
            torch.testing.assert_close(ours[finite], want[finite], rtol=rtol, atol=1e-30, msg=name)
            assert ours[gate.numel() - 1].isnan(), "NaN in, NaN out"


# ---- shapes, strides, dtypes ----


@backends
@kinds
def test_limits_and_offset(backend: str, kind: str) -> None:
    if kind not in reference.GATED:
        pytest.skip("of the halves of gated kinds")
    inputs, dy = tensors(kind, (6,), 70, torch.float32, True, True)
    options = {"linear_offset": 1.0, "clamp": 1.5}
    exact = forward_backward(call(definition, kind, True, True, **options), inputs, dy, torch.float64)
    for ours, truth in zip(
        forward_backward(call(BACKENDS[backend], kind, True, True, **options), inputs, dy), exact, strict=True
    ):
        assert error(ours, truth) < 1e-6


@pytest.mark.parametrize(("backend", "kind"), [("cpu", "gelu"), ("triton", "swiglu"), ("triton", "gelu")])
def test_strides_do_not_matter(backend: str, kind: str) -> None:
    inputs, dy = tensors(kind, (4, 3), 10, torch.float32, True, False)
    x, bias = inputs
    plain = forward_backward(call(BACKENDS[backend], kind, True, False), inputs, dy)
    views = {
        "transposed": x.transpose(0, 1).contiguous().transpose(0, 1),
        "slice of a wider tensor": torch.cat([x, x], -1)[..., : x.shape[-1]],
        "last dimension strided": torch.stack([x, x], -1)[..., 0],
        "one row for all": x[:1, :1].expand(4, 3, -1),
    }
    for name, view in views.items():
        assert not view.is_contiguous(), name
        leaf = view.detach().requires_grad_()
        y = BACKENDS[backend](leaf, kind, bias)
        y.backward(dy.transpose(0, 1).contiguous().transpose(0, 1))
        assert y.is_contiguous() and leaf.grad is not None
        if name == "one row for all":
            assert torch.equal(y, BACKENDS[backend](x[:1, :1], kind, bias).expand_as(y))
        else:
            assert torch.equal(y, plain[0]) and torch.equal(leaf.grad, plain[1]), name


@backends
@kinds
@pytest.mark.parametrize("rows", [(0,), (2, 0), (), (1,)])
def test_empty_single_and_one_dimensional_inputs(backend: str, kind: str, rows: tuple[int, ...]) -> None:
    inputs, dy = tensors(kind, rows, 4, torch.bfloat16, True, True)
    got = forward_backward(call(BACKENDS[backend], kind, True, True), inputs, dy)
    assert [t.shape for t in got] == [dy.shape, *(t.shape for t in inputs)]
    assert [t.dtype for t in got] == [dy.dtype, *(t.dtype for t in inputs)]
    if 0 in rows:
        assert not got[2].any(), "the sum over no rows"
    else:
        exact = forward_backward(call(definition, kind, True, True), inputs, dy, torch.float64)
        # Triton's interpreter cuts off where a GPU rounds: twice as much.
        allowed = bound(torch.bfloat16, 8, roundings=4 if backend == "triton" else 1)
        assert all(error(ours, truth) <= allowed for ours, truth in zip(got, exact, strict=True))


@backends
@pytest.mark.parametrize("kind", ["swiglu", "squared_relu"])
def test_rows_without_columns(backend: str, kind: str) -> None:
    inputs, dy = tensors(kind, (3,), 0, torch.float32, True, True)
    y, dx, dbias, dweights = forward_backward(call(BACKENDS[backend], kind, True, True), inputs, dy)
    assert y.numel() == dx.numel() == dbias.numel() == 0
    assert torch.equal(dweights, torch.zeros(3, 1))


@pytest.mark.parametrize("weights_dtype", DTYPES)
@pytest.mark.parametrize("backend", ["cpu", "triton", "recompute"])
def test_the_result_has_the_dtype_of_x_and_gradients_those_of_their_inputs(
    backend: str, weights_dtype: torch.dtype
) -> None:
    inputs, dy = tensors("swiglu", (5,), 8, torch.bfloat16, True, True)
    inputs = [inputs[0], inputs[1].float(), inputs[2].to(weights_dtype)]
    got = forward_backward(call(BACKENDS[backend], "swiglu", True, True), inputs, dy)
    assert [t.dtype for t in got] == [torch.bfloat16, torch.bfloat16, torch.float32, weights_dtype]


@pytest.mark.parametrize("which", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)])
@pytest.mark.parametrize("backend", ["cpu", "triton", "recompute"])
def test_only_the_wanted_gradients_are_made(backend: str, which: tuple[int, int, int]) -> None:
    inputs, dy = tensors("swiglu", (6,), 9, torch.float32, True, True)
    full = forward_backward(call(BACKENDS[backend], "swiglu", True, True), inputs, dy)[1:]
    leaves = [t.clone().requires_grad_(bool(wanted)) for t, wanted in zip(inputs, which, strict=True)]
    BACKENDS[backend](leaves[0], "swiglu", *leaves[1:]).backward(dy)
    for leaf, wanted, want in zip(leaves, which, full, strict=True):
        assert (leaf.grad is not None and torch.equal(leaf.grad, want)) if wanted else leaf.grad is None


# ---- what is kept ----


@pytest.mark.parametrize("backend", ["cpu", "triton", "recompute"])
@kinds
def test_backward_keeps_the_inputs_and_nothing_else(backend: str, kind: str) -> None:
    inputs, _ = tensors(kind, (6,), 9, torch.bfloat16, True, True)
    leaves = [t.requires_grad_() for t in inputs]
    kept: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        BACKENDS[backend](leaves[0], kind, *leaves[1:])
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in leaves}


@compiled
def test_a_changed_input_is_noticed() -> None:
    inputs, dy = tensors("swiglu", (6,), 9, torch.float32, True, False)
    x, bias = inputs[0], inputs[1].requires_grad_()
    y = activation(x, "swiglu", bias)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


@compiled
def test_the_number_of_threads_changes_no_bit() -> None:
    inputs, dy = tensors("geglu", (300,), 130, torch.float32, True, True)
    run = call(activation, "geglu", True, True)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        many = forward_backward(run, inputs, dy)
    finally:
        torch.set_num_threads(before)
    with one_thread():
        one = forward_backward(run, inputs, dy)
    assert all(torch.equal(a, b) for a, b in zip(many, one, strict=True))


# ---- which backend ----


def test_the_cpu_serves_every_kind_and_dtype() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        with force("activation", "cpu"):
            assert activation(torch.zeros(2, 8, dtype=dtype), "swiglu").shape == (2, 4)
        assert why_not(torch.zeros(2, 8, dtype=dtype), "gelu") == []


def test_without_a_compiler_the_definition_serves_and_says_so_once() -> None:
    code = (
        "import logging, torch\n"
        "heard = []\n"
        "handler = logging.Handler(); handler.emit = lambda record: heard.append(record.getMessage())\n"
        "logging.getLogger('mindspeed_lite').addHandler(handler)\n"
        "from mindspeed_lite.ops.activation import activation\n"
        "x = torch.randn(4, 6, requires_grad=True)\n"
        "for _ in range(2): activation(x, 'gelu', torch.ones(6)).sum().backward()\n"
        "assert len(heard) == 1 and 'no-such-compiler' in heard[0] and 'activation' in heard[0], heard\n"
    )
    environment = clean_environment(CXX="no-such-compiler")
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.filterwarnings("ignore")
def test_it_compiles() -> None:
    inputs, dy = tensors("swiglu", (6,), 9, torch.float32, True, True)
    torch._dynamo.reset()
    run = call(activation, "swiglu", True, True)
    compiled = torch.compile(lambda x, *rest: run(x * 1.0, *rest), backend="aot_eager")
    exact = forward_backward(run, inputs, dy, torch.float64)
    for ours, truth in zip(forward_backward(compiled, inputs, dy), exact, strict=True):
        assert error(ours, truth) < 1e-6


def test_fake_tensors_have_the_shapes_of_real_ones() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.zeros(3, 2, 8, dtype=torch.bfloat16, requires_grad=True)
        y = activation(x, "swiglu", torch.zeros(8, dtype=torch.bfloat16), torch.zeros(3, 2, 1))
        y.backward(torch.zeros_like(y))
    assert (y.shape, y.dtype) == ((3, 2, 4), torch.bfloat16) and x.grad is not None and x.grad.shape == x.shape


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (((2, 8), "silu"), {}),
        (((2, 7), "swiglu"), {}),
        (((), "squared_relu"), {}),
        (((2, 8), "gelu"), {"clamp": 1.0}),
        (((2, 8), "squared_relu"), {"linear_offset": 1.0}),
        (((2, 8), "swiglu"), {"bias": torch.zeros(4)}),
        (((2, 8), "swiglu"), {"weights": torch.zeros(2)}),
        (((2, 8), "swiglu"), {"weights": torch.zeros(1, 1)}),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[Any, str], options: dict[str, Any]) -> None:
    shape, kind = arguments
    with pytest.raises(ValueError, match="activation: "):
        activation(torch.zeros(shape), kind, **options)


# ---- the NPU path on an emulation of torch_npu ----

ON_NPU = [kind for kind in KINDS if kind not in ("quick_geglu", "squared_relu")]


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ON_NPU)
def test_the_npu_path_computes_it(npu_twin: list[twin.Call], kind: str, bias: bool, weights: bool) -> None:
    for dtype in DTYPES:
        for rows in ((), (5,), (3, 2), (1, 2) * 4):
            inputs, dy = tensors(kind, rows, 8, dtype, bias, weights)
            exact = forward_backward(call(definition, kind, bias, weights), inputs, dy, torch.float64)
            with force("activation", "npu"):
                got = forward_backward(call(activation, kind, bias, weights), inputs, dy)
            for ours, truth, leaf in zip(got, exact, [dy, *inputs], strict=True):
                assert ours.dtype == leaf.dtype and ours.shape == leaf.shape
                # Besides one rounding of the result: of x + bias, of gelu(gate), and of y before the weights.
                assert error(ours, truth) <= bound(dtype, 8, roundings=4)
    want = "npu_swiglu" if kind == "swiglu" else "npu_gelu"
    assert {call.function for call in npu_twin} == {want}


def test_the_npu_path_has_a_reason_for_what_torch_npu_has_no_operator_for(npu_twin: list[twin.Call]) -> None:
    x = torch.zeros(2, 8)
    with force("activation", "npu"):
        assert all("torch_npu has an operator for" in why_not(x, kind)[0] for kind in set(KINDS) - set(ON_NPU))
        assert all(
            "limit or an offset" in why_not(x, "swiglu", **has_clamp_or_offset)[0]
            for has_clamp_or_offset in ({"clamp": 1.0}, {"linear_offset": 1.0})
        )
        (reason,) = why_not(x.double(), "swiglu")
        assert "float64" in reason
        with pytest.raises(RuntimeError, match="cannot serve"):
            activation(x, "squared_relu")
    assert npu_twin == []


def test_the_twin_notices_wrong_calls() -> None:
    from .twin.activation import npu_gelu, npu_swiglu

    for wrong in (
        lambda: npu_swiglu(torch.zeros(2, 7), dim=-1),
        lambda: npu_swiglu(torch.zeros(2, 8, dtype=torch.float64), dim=-1),
        lambda: npu_gelu(torch.zeros(2, 8), approximate="erf"),
        lambda: npu_gelu(torch.zeros((1,) * 9), approximate="tanh"),
    ):
        with pytest.raises(ValueError):
            wrong()
    with pytest.raises(TypeError):
        npu_gelu(torch.zeros(2, 8), "tanh")  # type: ignore[misc]
    x = torch.randn(4, 8)
    assert error(npu_gelu(x), npu_gelu(x, approximate="tanh")) > 1e-5


# ---- Triton ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("whole_rows", [False, True])
def test_triton_rows_longer_than_a_piece(dtype: torch.dtype, whole_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_BLOCK", 16)
    inputs, dy = tensors("geglu", (3,), 50, dtype, True, whole_rows)
    exact = forward_backward(call(definition, "geglu", True, whole_rows), inputs, dy, torch.float64)
    for ours, truth in zip(
        forward_backward(call(_unpacked(cuda.activation), "geglu", True, whole_rows), inputs, dy), exact, strict=True
    ):
        # The interpreter cuts to bfloat16 where a GPU rounds.
        assert error(ours, truth) <= torch.finfo(ours.dtype).eps + 4e-7


@pytest.mark.parametrize("kind", ["swiglu", "squared_relu"])
def test_triton_kernels_keep_everything_in_registers_of_an_h100(kind: str) -> None:
    gated, floats = kind in reference.GATED, {"linear_offset": "fp32", "clamp": "fp32"}
    shared = {"x": "*bf16", "bias": "*bf16", "weights": "*fp32", "stride": "i64", **floats}
    how = {"HALF": 14336, "KIND": kind, "GATED": gated, "HAS_BIAS": True, "HAS_WEIGHTS": True, "BLOCK": 1024}
    how |= {"PIECES": 1, "BENT": 3 if gated else 0}
    module = "mindspeed_lite.ops.activation.cuda"
    forward = compile_sm90(f"{module}:forward_kernel", {**shared, "y": "*bf16"}, how, num_warps=4)
    backward = compile_sm90(
        f"{module}:backward_kernel",
        {**shared, "dy": "*bf16", "dx": "*bf16", "dweights": "*fp32"},
        {**how, "WANTS_DWEIGHTS": True},
        num_warps=4,
    )
    # Up to 64 registers a thread, eight such programs fit on a multiprocessor, enough to keep its memory busy.
    assert forward.spills == backward.spills == 0 and max(forward.registers, backward.registers) <= 64


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@kinds
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda(kind: str, dtype: torch.dtype) -> None:
    inputs, dy = tensors(kind, (129,), 1000, dtype, True, True)
    exact = forward_backward(call(definition, kind, True, True), inputs, dy, torch.float64)
    got = forward_backward(call(activation, kind, True, True), [t.cuda() for t in inputs], dy.cuda())
    for ours, truth in zip(got, exact, strict=True):
        assert error(ours.cpu(), truth) <= torch.finfo(ours.dtype).eps / 2 + 4e-7
    assert OPERATOR.unusable("cuda") == []
