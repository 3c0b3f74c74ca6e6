"""Liger-Kernel beside our operators: what bench-ops times computes the same, on a GPU or in Triton's interpreter."""

import importlib
import importlib.util
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu import liger
from mindspeed_lite.bench.operators import equivalence, run
from mindspeed_lite.ops.case import OwnLayout, Problem
from mindspeed_lite.ops.discovery import cases

# Every kind of case that Liger-Kernel is listed for, small.
CASES = [
    ("activation", "6x64"),
    ("activation", "6x64,kind=geglu"),
    ("activation", "6x64,kind=squared_relu"),
    ("cross_entropy", "6x48"),
    ("layer_norm", "6x48"),
    ("linear_cross_entropy", "6x16x48"),
    ("rms_norm", "6x48"),
    ("rope", "s=5,b=2,n=3,d=8"),
    ("rope", "s=5,n=2,d=8,r=4"),
    ("vocab_embedding", "24x16x32,main=1"),
]


def compared(name: str, text: str) -> Problem:
    declared, device = cases(name), "cuda" if torch.cuda.is_available() else "cpu"
    problem = declared.problem(text, device, torch.float32)
    theirs = liger.contenders(name, declared.parse(text))
    return replace(problem, contenders=(problem.contenders[0], *theirs))


def test_every_operator_that_it_has_a_function_for_has_a_case_here() -> None:
    assert set(liger.PEERS) == {name for name, _ in CASES}
    assert all(len(compared(name, text).contenders) == 2 for name, text in CASES)
    assert len(compared("rope", "s=5,n=1,d=8").contenders) == len(compared("permute", "8x4x2x1").contenders) == 1


@pytest.fixture
def interpreted(triton_runs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Triton 3.6's interpreter lacks of what these kernels use: numbers as tensors, and libdevice."""
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed: pip install 'mindspeed-lite[compare]'")
    if torch.cuda.is_available():
        return
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def implicit(value: object) -> object:
        return interpreter.interpreter_semantic.to_tensor(value) if type(value) is float else convert(value)

    monkeypatch.setattr(interpreter, "_implicit_cvt", implicit)
    functions = {"rsqrt": lambda x: 1 / tl.sqrt(x), "tanh": lambda x: 2 * tl.sigmoid(2 * x) - 1}
    for file in ("rms_norm", "layer_norm", "geglu"):
        module = importlib.import_module(f"liger_kernel.ops.{file}")
        for name, function in functions.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, function)


@pytest.mark.parametrize(("name", "text"), CASES)
def test_liger_computes_the_same(name: str, text: str, interpreted: None) -> None:
    case = compared(name, text)
    inputs = case.make()
    before = [each.detach().clone() for each in inputs]
    ours, theirs = (equivalence.outcome(each.load(), inputs) for each in case.contenders)
    assert equivalence.disagreement(ours, theirs, torch.float32) is None
    # It may write over inputs of its own, and over nothing else.
    assert all(torch.equal(each, kept) for each, kept in zip(inputs, before, strict=True))
    # The timed call is the one that was compared.
    function = case.contenders[1].load()
    if isinstance(function, OwnLayout):
        for backward in (False, True):
            with torch.set_grad_enabled(backward):
                (call,) = run.one_calls({"liger": function}, inputs, None, {}, backward=backward).values()
                assert call() is not None
    assert all(torch.equal(each, kept) for each, kept in zip(inputs, before, strict=True))
