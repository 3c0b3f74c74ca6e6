"""What bench-ops measures: every operator, its shapes, the work counted, and contenders that compute the same."""

import dataclasses

import pytest
import torch

from mindspeed_lite.bench import operators
from mindspeed_lite.bench.operators import Work, equivalence, run
from mindspeed_lite.ops import activation, moe_router, rope
from mindspeed_lite.ops.activation import cases as activation_cases
from mindspeed_lite.ops.attention import bench as attention_bench
from mindspeed_lite.ops.attention import cases as attention_cases
from mindspeed_lite.ops.discovery import OPERATORS, cases
from mindspeed_lite.ops.moe_router import cases as moe_router_cases
from mindspeed_lite.ops.rope import cases as rope_cases


@pytest.fixture(autouse=True)
def no_peers(monkeypatch):
    monkeypatch.setattr(operators, "_is_installed", lambda package: False)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_declared_and_documented_shapes_can_be_read(name, device):
    declared = cases(name)
    for texts in (declared.shapes(device, True), declared.shapes(device, False), declared.tiny, declared.numerics):
        names = [operators.case(name, text, device, torch.bfloat16).name for text in texts]
        assert len(set(names)) == len(names) and (names or texts is declared.numerics)
    case = operators.case(name, declared.example, device, torch.bfloat16)
    assert [each.name for each in case.contenders][:2] == ["mindspeed_lite", "torch"]
    assert "torch.compile" in [each.name for each in case.contenders]


@pytest.mark.parametrize(("name", "text"), [(name, text) for name in OPERATORS for text in cases(name).tiny])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_contenders_compute_the_same(name, text, dtype):
    case = operators.case(name, text, "cpu", dtype)
    inputs = case.make()
    assert all(torch.equal(a, b) for a, b in zip(inputs, case.make(), strict=True))
    ours, *others = [
        equivalence.outcome(each.load(), inputs) for each in case.contenders if each.name != operators.COMPILED
    ]
    assert others and [equivalence.disagreement(ours, theirs, dtype) for theirs in others] == [None] * len(others)


def test_what_the_torch_free_files_repeat_is_what_the_operators_have():
    assert activation_cases._KINDS == activation.KINDS and tuple(activation.reference.GATED) == activation_cases._GATED
    assert rope_cases._PAIRS == rope.PAIRS and moe_router_cases._SCORE_FUNCTIONS == moe_router.SCORE_FUNCTIONS


def test_compiled_is_the_plain_path_compiled(monkeypatch):
    given = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: given.append((function, options)) or function)
    plain, compiled = operators.case("rms_norm", "4x4", "cpu", torch.float32).contenders[1:3]
    compiled.load()
    ((function, options),) = given
    assert function.__code__ is plain.load().__code__ and options == {"dynamic": False}


def test_bytes_and_operations():
    norm = operators.case("rms_norm", "10x20", "cpu", torch.bfloat16)
    assert norm.forward == Work(2 * (2 * 200 + 20), 800) and norm.both.bytes == 2 * (5 * 200 + 3 * 20)
    full = operators.case("attention", "s=8,b=2,n=4,g=2,d=16,causal=0", "cpu", torch.float32)
    assert full.forward.flops == 2 * 2 * 2 * 4 * 16 * 64 and full.both.flops == 3 * full.forward.flops
    assert full.forward.bytes == 4 * (2 * 8 * 2 * 4 * 16 + 2 * 8 * 2 * 2 * 16)
    turned = operators.case("rope", "s=8,b=2,n=4,d=16,r=6", "cpu", torch.bfloat16)
    assert turned.forward == Work(2 * 2 * 8 * 2 * 4 * 16 + 2 * 8 * 6 * 4, 3 * 8 * 2 * 4 * 6)


@pytest.mark.parametrize("text", ["s=9,n=1,d=1", "s=9,n=1,d=1,w=3", "s=9,n=1,d=1,w=0", "s=9,n=1,d=1,w=50",
                                  "s=9,n=1,d=1,w=3,causal=0", "s=9,n=1,d=1,causal=0"])  # fmt: skip
def test_visible_pairs_are_those_of_the_mask(text):
    shape = attention_cases.parse(text)
    hidden = attention_bench.hidden(shape, "cpu")
    assert attention_cases.visible_pairs(shape) == (81 if hidden is None else int((~hidden).sum()))


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("permute", "1024x64x4", "TOKENSxHIDDEN"),
        ("permute", "1024x64x4x5", "TOPK of EXPERTS"),
        ("rms_norm", "1024", "ROWSxHIDDEN"),
        ("rms_norm", "0x5", "at least 1"),
        ("rms_norm", "4x-5", "ROWSxHIDDEN"),
        ("attention", "s=4", "n and d missing"),
        ("attention", "s=4,n=3,d=8,g=2", "do not divide"),
        ("attention", "s=4,n=3,d=8,x=2", "'x' is none of"),
        ("attention", "s=4,s=5,n=3,d=8", "twice"),
        ("attention", "s=0,n=3,d=8", "at least 1"),
        ("attention", "s=a,n=3,d=8", "whole number"),
        ("attention", "s=4,n=3,d=8,causal=2", "0 or 1"),
        ("attention", "", "is none of"),
        ("moe_router", "4x8", "want TOKENSxEXPERTS,k=TOPK"),
        ("moe_router", "4x8,k=2,scores=relu", "softmax"),
        ("moe_router", "4x8,k=2,groups=3/2", "2 of 3 groups"),
        ("rope", "s=4", "n and d missing"),
        ("rope", "s=4,n=3,d=8,r=3", "even number within"),
        ("rope", "s=4,n=3,d=8,pairs=thirds", "pairs is one of"),
        ("rope", "s=4,s=5,n=3,d=8", "twice"),
        ("rope", "s=0,n=3,d=8", "at least 1"),
    ],
)
def test_a_shape_that_cannot_be_read(name, text, word):
    with pytest.raises(ValueError, match=word):
        operators.case(name, text, "cpu", torch.float32)


def test_peers_are_listed_where_installed_and_only_on_a_gpu(monkeypatch):
    monkeypatch.setattr(operators, "_is_installed", lambda package: package in ("liger_kernel", "flash_attn"))

    def names(name, text, device):
        return [each.name for each in operators.case(name, text, device, torch.bfloat16).contenders]

    assert names("rms_norm", "4x4", "cuda")[3:] == ["liger"] and names("rms_norm", "4x4", "cpu")[3:] == []
    assert names("attention", "s=4,n=1,d=4", "cuda")[4:] == ["flash_attn"]


def test_contenders_that_draw_are_not_compared():
    case = operators.case("bias_dropout_add", "64x64,p=0.5", "cpu", torch.float32).only("mindspeed_lite", "torch")
    errors = {}
    assert (
        list(run.equivalent_contenders(case, case.contenders, case.make(), errors)[0]) == ["mindspeed_lite", "torch"]
        and not errors
    )
    assert list(
        run.equivalent_contenders(dataclasses.replace(case, is_random=False), case.contenders, case.make(), errors)[0]
    ) == ["mindspeed_lite"]
    assert "does not agree" in errors["torch"]
