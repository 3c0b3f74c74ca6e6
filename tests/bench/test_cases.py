"""What bench-ops measures: every operator, its shapes, the work counted, and contenders that compute the same."""

import dataclasses

import pytest
import torch

from mindspeed_lite.bench import operators
from mindspeed_lite.bench.operators import OPERATORS, Work, agreement, attention, rms_norm, rope, run
from mindspeed_lite.ops import dispatch


@pytest.fixture(autouse=True)
def no_peers(monkeypatch):
    monkeypatch.setattr(operators, "_is_installed", lambda package: False)


def test_every_operator_is_measured():
    assert set(OPERATORS) == set(dispatch.OPERATORS), "an operator without a file in bench/operators, or the reverse"


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_default_and_documented_shapes_can_be_read(name, device):
    file = operators.module(name)
    for quick in (True, False):
        cases = [file.case(text, device, torch.bfloat16) for text in file.shapes(device, quick)]
        names = [case.name for case in cases]
        assert names and len(set(names)) == len(names)
    case = file.case(OPERATORS[name].example, device, torch.bfloat16)
    assert [each.name for each in case.contenders][:2] == ["mindspeed_lite", "torch"]
    assert "torch.compile" in [each.name for each in case.contenders]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("adamw", "3x40"),
        ("l2norm", "3x40"),
        ("grouped_matmul", "24x16x32x3"),
        ("bias_dropout_add", "24x48"),
        ("masked_softmax", "2x3x24x24"),
        ("masked_softmax", "2x3x20x24,causal=0"),
        ("permute", "24x48x6x2"),
        ("rms_norm", "24x48"),
        ("moe_router", "24x48,k=4"),
        ("moe_router", "24x48,k=4,pre=1,groups=4/2"),
        ("moe_router", "24x48,k=4,scores=sigmoid,groups=4/2,bias=1"),
        ("moe_router", "24x48,k=1,scores=sqrtsoftplus"),
        ("activation", "24x48"),
        ("activation", "24x48,kind=gelu,bias=1"),
        ("activation", "24x48,kind=squared_relu,weights=1"),
        ("attention", "s=12,n=4,d=8"),
        ("attention", "s=12,b=2,n=4,g=2,d=8"),
        ("attention", "s=12,n=2,d=8,w=3"),
        ("attention", "s=12,n=2,d=8,w=3,causal=0"),
        ("attention", "s=12,n=2,d=8,causal=0"),
        ("rope", "s=12,n=2,d=8"),
        ("rope", "s=12,b=2,n=2,d=8,r=4,pairs=interleaved"),
        ("rope", "s=12,n=2,d=8,r=6,pairs=regrouped"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_contenders_compute_the_same(name, text, dtype):
    case = operators.module(name).case(text, "cpu", dtype)
    inputs = case.make()
    assert all(torch.equal(a, b) for a, b in zip(inputs, case.make(), strict=True))
    ours, *others = [
        agreement.outcome(each.load(), inputs) for each in case.contenders if each.name != operators.COMPILED
    ]
    assert others and [agreement.disagreement(ours, theirs, dtype) for theirs in others] == [None] * len(others)


def test_compiled_is_the_plain_path_compiled(monkeypatch):
    given = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: given.append((function, options)) or function)
    operators.compiled(lambda: rms_norm.plain).load()
    assert given == [(rms_norm.plain, {"dynamic": False})]


def test_bytes_and_operations():
    norm = rms_norm.case("10x20", "cpu", torch.bfloat16)
    assert norm.forward == Work(2 * (2 * 200 + 20), 800) and norm.both.bytes == 2 * (5 * 200 + 3 * 20)
    full = attention.case("s=8,b=2,n=4,g=2,d=16,causal=0", "cpu", torch.float32)
    assert full.forward.flops == 2 * 2 * 2 * 4 * 16 * 64 and full.both.flops == 3 * full.forward.flops
    assert full.forward.bytes == 4 * (2 * 8 * 2 * 4 * 16 + 2 * 8 * 2 * 2 * 16)
    turned = rope.case("s=8,b=2,n=4,d=16,r=6", "cpu", torch.bfloat16)
    assert turned.forward == Work(2 * 2 * 8 * 2 * 4 * 16 + 2 * 8 * 6 * 4, 3 * 8 * 2 * 4 * 6)


@pytest.mark.parametrize("text", ["s=9,n=1,d=1", "s=9,n=1,d=1,w=3", "s=9,n=1,d=1,w=0", "s=9,n=1,d=1,w=50",
                                  "s=9,n=1,d=1,w=3,causal=0", "s=9,n=1,d=1,causal=0"])  # fmt: skip
def test_visible_pairs_are_those_of_the_mask(text):
    shape = attention.parse(text)
    hidden = attention._hidden(shape, "cpu")
    assert attention.visible_pairs(shape) == (81 if hidden is None else int((~hidden).sum()))


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
        operators.module(name).case(text, "cpu", torch.float32)


def test_peers_are_listed_where_installed_and_only_on_a_gpu(monkeypatch):
    monkeypatch.setattr(operators, "_is_installed", lambda package: package in ("liger_kernel", "flash_attn"))

    def names(file, text, device):
        return [each.name for each in file.case(text, device, torch.bfloat16).contenders]

    assert names(rms_norm, "4x4", "cuda")[3:] == ["liger"] and names(rms_norm, "4x4", "cpu")[3:] == []
    assert names(attention, "s=4,n=1,d=4", "cuda")[4:] == ["flash_attn"]


def test_contenders_that_draw_are_not_compared():
    case = operators.module("bias_dropout_add").case("64x64,p=0.5", "cpu", torch.float32)
    case = dataclasses.replace(case, contenders=case.contenders[:2])
    errors = {}
    assert list(run._agreeing(case, case.make(), errors)[0]) == ["mindspeed_lite", "torch"] and not errors
    assert list(run._agreeing(dataclasses.replace(case, draws=False), case.make(), errors)[0]) == ["mindspeed_lite"]
    assert "does not agree" in errors["torch"]
