"""What holds for every operator, on the shapes of its `cases.py`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from mindspeed_lite.bench.operators import equivalence
from mindspeed_lite.bench.selftest import FAILED, numerics
from mindspeed_lite.ops import discovery
from mindspeed_lite.ops.attention import cases as attention_cases
from mindspeed_lite.ops.case import COMPILED, TORCH, Function, OperatorCases, Problem
from mindspeed_lite.ops.dispatch import OPERATORS, operator
from tests.harness.processes import clean_environment
from tools.fuzz.calls import LAYOUTS, Call
from tools.fuzz.judge import finding

ROOT = Path(__file__).resolve().parents[2]
OPS = ROOT / "mindspeed_lite" / "ops"
EVERY_OPERATOR = pytest.mark.parametrize("name", OPERATORS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = {name: discovery.cases(name) for name in OPERATORS}
EVERY_SHAPE = pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, declared in CASES.items() for text in declared.checked("cpu")]
)


def small(declared: OperatorCases, dtype: torch.dtype) -> list[Problem]:
    """The problems that take milliseconds."""
    found = [declared.problem(text, "cpu", dtype) for text in declared.checked("cpu")]
    return [each for each in found if (each.both or each.forward).flops < 1 << 27]


# Files and declarations


def test_folders_are_found_and_nothing_else() -> None:
    folders = {path.parent.name for path in OPS.glob("*/__init__.py")}
    assert set(OPERATORS) == folders - {"native", "norm"} and list(OPERATORS) == sorted(OPERATORS)
    assert all(package == f"mindspeed_lite.ops.{name}" for name, package in OPERATORS.items())
    with pytest.raises(ValueError, match="unknown operator 'sort'"):
        discovery.cases("sort")


@EVERY_OPERATOR
def test_it_has_its_files(name: str) -> None:
    folder, found = OPS / name, operator(name)
    assert found.name == CASES[name].operator == name
    assert all((folder / file).is_file() for file in ("__init__.py", "cases.py"))
    files = {each for each in ("cpu", "cuda", "npu") if (folder / f"{each}.py").is_file()}
    assert files <= set(found.backends) and all(find_spec(each) for each in found.backends.values())
    assert all(found.backends[each] == f"mindspeed_lite.ops.{name}.{each}" for each in files)
    shared = found.reference.__module__.split(".")[-2]
    assert any((ROOT / "tests" / "ops" / f"test_{each}.py").is_file() for each in (name, shared))


@EVERY_OPERATOR
def test_calls_of_torch_npu_have_an_emulation_and_a_contract(name: str) -> None:
    backend = OPS / name / "npu.py" if name != "rms_norm" else OPS / "norm" / "npu.py"
    if not backend.is_file() or "torch_npu.npu_" not in backend.read_text(encoding="utf-8"):
        pytest.skip("no call of torch_npu")
    assert (ROOT / "tests" / "ops" / "twin" / f"{name}.py").is_file()
    assert (ROOT / "tests" / "npu_contract" / "operators" / f"{name}.py").is_file()


@EVERY_OPERATOR
def test_its_cases_are_declared(name: str) -> None:
    declared = CASES[name]
    for texts in (declared.checked("cpu"), declared.cpu, declared.accelerator, declared.timed("cpu", True)):
        assert texts and len(set(texts)) == len(texts)
        for text in texts:
            problem = declared.problem(text, "cpu", torch.bfloat16)
            assert problem.name == f"{text} bf16" and problem.forward.bytes > 0
            assert problem.both is None or problem.both.bytes > problem.forward.bytes


# Results


@EVERY_SHAPE
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_contenders_compute_the_same(name: str, text: str, dtype: torch.dtype) -> None:
    problem = CASES[name].problem(text, "cpu", dtype)
    inputs = problem.make()
    assert all(torch.equal(a, b) for a, b in zip(inputs, problem.make(), strict=True))
    ours = equivalence.outcome(problem.contenders[0].load(), inputs)
    for each in problem.contenders[1:]:
        # PyTorch's grouped product wants rows of 16 bytes and no float64.
        if each.name != COMPILED and (each.name == TORCH or each.name != "torch grouped_mm"):
            assert equivalence.disagreement(ours, equivalence.outcome(each.load(), inputs), dtype) is None, each.name


@EVERY_OPERATOR
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_results_on_the_cpu_are_those_of_float64(name: str, dtype: torch.dtype) -> None:
    for problem in small(CASES[name], dtype):
        outcome = numerics.judge(problem, "cpu")
        assert outcome.status != FAILED, f"{problem.name}: {outcome.text}"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@EVERY_OPERATOR
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_results_on_a_gpu_are_those_of_float64(name: str, dtype: torch.dtype) -> None:
    for text in CASES[name].checked("cuda"):
        outcome = numerics.judge(CASES[name].problem(text, "cuda", dtype), "cuda")
        assert outcome.status != FAILED, f"{text}: {outcome.text}"


def derivative(function: Function, inputs: Sequence[torch.Tensor], place: int) -> tuple[float, float]:
    """That of <output, dy> along a direction of one input: by autograd, and by differences."""
    leaves = [each.detach().requires_grad_(number == place) for number, each in enumerate(inputs)]
    out = function(*leaves)
    dy = equivalence.output_gradient(out)
    (gradient,) = torch.autograd.grad(out, leaves[place], dy)
    direction = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(3), dtype=gradient.dtype)
    sides = []
    for step in (1e-6, -1e-6):
        moved = [each.detach() for each in inputs]
        moved[place] = moved[place] + step * direction
        sides.append(float((function(*moved) * dy).sum()))
    return float((gradient * direction).sum()), (sides[0] - sides[1]) / 2e-6


@EVERY_OPERATOR
def test_gradients_are_derivatives(name: str) -> None:
    shapes = [each for each in small(CASES[name], torch.float64) if not each.is_random and each.both is not None]
    for problem in shapes:
        inputs = problem.make()
        for place, each in enumerate(inputs):
            if each.requires_grad:
                exact, measured = derivative(problem.contenders[0].load(), inputs, place)
                assert exact == pytest.approx(measured, rel=1e-5, abs=1e-5), f"{problem.name}, input {place + 1}"


# Calls of all kinds, judged by the fuzz run's bound


@EVERY_OPERATOR
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_layouts_do_not_matter(name: str, dtype: str) -> None:
    for text in CASES[name].checked("cpu"):
        for first, layout in enumerate(LAYOUTS):
            call = Call(name, text, dtype, layouts=(layout, LAYOUTS[(first + 2) % len(LAYOUTS)]))
            assert finding(call) == "", call.json()


@EVERY_OPERATOR
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_empty_inputs(name: str, dtype: str) -> None:
    for text in CASES[name].checked("cpu"):
        for place in range(4):
            call = Call(name, text, dtype, empty=place)
            assert finding(call) == "", call.json()


@EVERY_OPERATOR
def test_a_compiler_traces_it(name: str) -> None:
    for text in CASES[name].checked("cpu")[:3]:
        assert finding(Call(name, text, "fp32", mode="compiled")) == "", text


@EVERY_OPERATOR
@pytest.mark.parametrize("value", ["large", "zero", "nan", "inf"])
def test_extreme_values(name: str, value: str) -> None:
    for text in CASES[name].checked("cpu")[:2]:
        for dtype in ("bf16", "fp32"):
            call = Call(name, text, dtype, values=value)
            assert finding(call) == "", call.json()


# Autograd, threads, compilers

# With kernels of ours alone: PyTorch's split their work by threads as they like.
OWN_SUMS = {path.parent.name for path in OPS.glob("*/cpu.cpp")} - {"activation"}


@EVERY_OPERATOR
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_no_bit(name: str, dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    for problem in small(CASES[name], dtype):
        function, inputs = problem.contenders[0].load(), problem.make()
        results = []
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(equivalence.outcome(function, inputs))
        finally:
            torch.set_num_threads(before)
        for other in results[1:]:
            for key, value in results[0].items():
                same = torch.equal(value, other[key])
                if name not in OWN_SUMS:
                    same = equivalence.relative_error(other[key], value) <= 4 * torch.finfo(dtype).eps
                assert same, f"{problem.name}: {key}"


@EVERY_OPERATOR
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_gradient_alone_is_the_one_of_all(name: str, dtype: torch.dtype) -> None:
    for problem in small(CASES[name], dtype):
        function, inputs = problem.contenders[0].load(), problem.make()
        found = equivalence.outcome(function, inputs)
        for place, each in enumerate(inputs[:4], 1):
            if not each.requires_grad:
                continue
            alone = [other.detach() for other in inputs]
            alone[place - 1].requires_grad_()
            ours = equivalence.outcome(function, alone)
            key = f"gradient of input {place}"
            assert key in ours and len([name for name in ours if name.startswith("gradient")]) == 1
            assert equivalence.relative_error(ours[key], found[key]) <= 4 * torch.finfo(dtype).eps


@EVERY_OPERATOR
def test_a_changed_input_is_noticed(name: str) -> None:
    """Autograd's error, or gradients that do not depend on the input."""
    for problem in small(CASES[name], torch.float32):
        if problem.both is None or problem.is_random:
            continue
        function, inputs = problem.contenders[0].load(), problem.make()
        out = function(*inputs)
        dy, wanted = equivalence.output_gradient(out), [each for each in inputs if each.requires_grad]
        want = torch.autograd.grad(out, wanted, dy, retain_graph=True)
        with torch.no_grad():
            for each in inputs:
                if each.is_floating_point():
                    each.add_(1)
        try:
            got = torch.autograd.grad(out, wanted, dy)
        except RuntimeError as error:
            assert "modified" in str(error) and "inplace" in str(error)
        else:
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), problem.name


# Bytes kept for the backward pass besides the inputs, in bf16.
KEPT = {
    "activation": ("64x1024", 0),
    "attention": ("s=128,n=4,d=64", 128 * 4 * (64 * 2 + 4)),  # the output, and a log-sum-exp for each row
    "bias_dropout_add": ("64x1024", 0),
    "cross_entropy": ("256x8192", 3 * 256 * 4),
    "grouped_matmul": ("300x64x96x4", 0),
    "layer_norm": ("64x1024", 2 * 64 * 4),
    "masked_softmax": ("1x4x128x128", 2 * 4 * 128 * 4),
    "permute": ("300x64x64x6", 1800 * 64 * 2 + (2 * 1800 + 301) * 4),  # the permuted rows, and row ids
    "rms_norm": ("64x1024", 64 * 4),
    "rope": ("s=128,n=4,d=64", 2 * 128 * 64 * 4),  # cos and sin
}


@pytest.mark.parametrize("name", KEPT)
def test_backward_keeps_the_inputs_and_little_else(name: str) -> None:
    text, allowed = KEPT[name]
    problem = CASES[name].problem(text, "cpu", torch.bfloat16)
    inputs = problem.make()
    function, saved = problem.contenders[0].load(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        function(*inputs)
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in saved}
    own = {each.untyped_storage().data_ptr() for each in inputs}
    assert sum(size for place, size in storages.items() if place not in own) <= allowed


WITHOUT_COMPILER = """
import torch
from mindspeed_lite.bench.selftest import FAILED, numerics
from mindspeed_lite.ops import dispatch
said = []
dispatch.on_fallback(lambda op, backend, reasons: said.append((op, *reasons)))
for problem in numerics.problems("cpu", True):
    if (problem.both or problem.forward).flops < 1 << 27:
        outcome = numerics.judge(problem, "cpu")
        assert outcome.status != FAILED, (problem.name, outcome.text)
why = [op for op, *reasons in said if any("no-such-compiler" in reason for reason in reasons)]
print(*why, sep=",")
"""


def test_without_a_compiler_each_says_so_once_and_computes() -> None:
    environment = clean_environment(CXX="no-such-compiler")
    ran = subprocess.run([sys.executable, "-c", WITHOUT_COMPILER], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    said = ran.stdout.strip().split(",")
    kernels = {name for name in OPERATORS if (OPS / name / "cpu.cpp").is_file()}
    assert len(said) == len(set(said)) and kernels <= set(said)


# Shapes


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("permute", "1024x64x4", "topk missing; want TOKENSxHIDDENxEXPERTSxTOPK, for example 4096x512x64x6"),
        ("permute", "1024x64x4x5", "topk=5 of 4 experts"),
        ("rms_norm", "1024", "hidden missing"),
        ("rms_norm", "0x5", "at least 1"),
        ("rms_norm", "4x-5", "whole number"),
        ("rms_norm", "4x5x6", "3 sizes"),
        ("rms_norm", "4x5,zero_centered=2", "zero_centered is one of 0, 1"),
        ("attention", "s=4", "n and d missing"),
        ("attention", "s=4,n=3,d=8,g=2", "do not divide"),
        ("attention", "s=4,n=3,d=8,x=2", "'x' is none of"),
        ("attention", "s=4,s=5,n=3,d=8", "twice"),
        ("attention", "", "whole number"),
        ("moe_router", "4x8x2,scores=relu", "softmax"),
        ("moe_router", "4x8x2,groups=3,group_topk=2", "2 of 3 groups"),
        ("rope", "s=4,n=3,d=8,r=3", "even number within"),
        ("bias_dropout_add", "4x8,p=1.5", "below 1"),
        ("bias_dropout_add", "4x8,p=a", "no number"),
    ],
)
def test_a_shape_that_cannot_be_read(name: str, text: str, word: str) -> None:
    with pytest.raises(ValueError, match=re.escape(word)):
        CASES[name].problem(text, "cpu", torch.float32)


@pytest.mark.parametrize("options", ["", ",w=3", ",w=0", ",w=50", ",w=3,causal=0", ",causal=0"])
def test_work_of_attention_counts_the_pairs_of_its_mask(options: str) -> None:
    declared = CASES["attention"]
    hidden = attention_cases.hidden(declared.parse(f"9x1x1{options}"))
    pairs = 81 if hidden is None else int((~hidden).sum())
    assert declared.problem(f"9x1x1{options}", "cpu", torch.float32).forward.flops == 4 * pairs
