"""The contracts themselves, on recorded calls that are changed afterwards: without torch_npu, in every test run.

The calls below are what the wheel's schemas bind; test_host_check.py makes such calls on the wheel itself. Grouped
matmul and packed sequences have no operator of ours yet: their contracts wait here for the first.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.npu_contract.attention_calls import UNLIMITED, visible_to
from tests.npu_contract.operators import violations
from tests.npu_contract.recorder import Call, Tensor, from_json, to_json

T, B, S, N, G, D = 24, 2, 12, 4, 2, 16


def tensor(*shape: int, dtype: str = "bfloat16", content: Any = None) -> Tensor:
    return Tensor(dtype, shape, "npu", True, content)


def attention(**changed: Any) -> Call:
    """A right call in layout TND, packed of two sequences."""
    arguments = {
        "query": tensor(T, N, D), "key": tensor(T, G, D), "value": tensor(T, G, D), "head_num": N,
        "input_layout": "TND", "pse": None, "padding_mask": None,
        "atten_mask": tensor(2048, 2048, dtype="bool", content="triangle"), "scale": 0.25, "keep_prob": 1.0,
        "pre_tockens": UNLIMITED, "next_tockens": UNLIMITED, "inner_precise": 0, "prefix": None,
        "actual_seq_qlen": [10, T], "actual_seq_kvlen": [10, T], "sparse_mode": 3,
    }  # fmt: skip
    named = ("head_num", "input_layout", "scale", "keep_prob")
    statistic = tensor(T, N, 8, dtype="float32")
    return Call("npu_fusion_attention", arguments, named, (tensor(T, N, D), statistic, statistic)).changed(**changed)


def attention_grad(**changed: Any) -> Call:
    """A right call of the backward in layout SBH."""
    query, key, statistic = tensor(S, B, N * D), tensor(S, B, G * D), tensor(B, N, S, 8, dtype="float32")
    arguments = {
        "query": query, "key": key, "value": key, "dy": query, "head_num": N, "input_layout": "SBH",
        "atten_mask": None, "softmax_max": statistic, "softmax_sum": statistic, "attention_in": query,
        "scale_value": 0.25, "keep_prob": 1.0, "pre_tockens": UNLIMITED, "next_tockens": UNLIMITED,
        "actual_seq_qlen": None, "actual_seq_kvlen": None, "sparse_mode": 0,
    }  # fmt: skip
    return Call("npu_fusion_attention_grad", arguments, None, (query, key, key)).changed(**changed)


def norm_backward(**changed: Any) -> Call:
    x, gamma = tensor(S, B, D), tensor(D)
    arguments = {"dy": x, "input": x, "gamma": gamma, "rstd": tensor(S, B, 1, dtype="float32")}
    return Call("npu_rms_norm_backward", arguments, None, (x, tensor(D, dtype="float32"))).changed(**changed)


def grouped_matmul(**changed: Any) -> Call:
    """A right call with counts: 3 groups over 24 rows."""
    arguments = {
        "x": [tensor(T, 8)], "weight": [tensor(3, 8, 5)], "bias": None,
        "group_list": tensor(3, dtype="int64", content=[4, 8, 12]), "split_item": 2, "group_type": 0,
        "group_list_type": 1,
    }  # fmt: skip
    named = ("group_list", "split_item", "group_type", "group_list_type")
    return Call("npu_grouped_matmul", arguments, named, ([tensor(T, 5)],)).changed(**changed)


def groups(*values: int) -> Tensor:
    return tensor(len(values), dtype="int64", content=list(values))


@pytest.mark.parametrize("call", [attention(), attention_grad(), norm_backward(), grouped_matmul()])
def test_right_calls_pass(call: Call) -> None:
    assert violations(call) == []


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (attention(actual_seq_qlen=[0, 10, T], actual_seq_kvlen=[0, 10, T]), "leading zero"),
        (attention(actual_seq_qlen=[10, 14]), "not cumulative to 24"),
        (attention(actual_seq_qlen=[T, 10]), "not cumulative"),
        (attention(actual_seq_qlen=tensor(2, dtype="int64")), "list of Python ints"),
        (attention(actual_seq_qlen=[5, 10, T]), "differ in length"),
        (attention(actual_seq_qlen=None), "actual_seq_qlen is None"),
        (attention(head_num=G), "query bfloat16[24, 4, 16] has 4 heads"),
        (attention(input_layout="SBH"), "key bfloat16[24, 2, 16]"),
        (attention(sparse_mode=5), "no contract yet"),
        (attention_grad(softmax_max=tensor(B, N, S, 1, dtype="float32")), "softmax_max"),
        (attention_grad(softmax_sum=tensor(B, S, N, 8, dtype="float32")), "softmax_sum"),
        (attention_grad(softmax_max=tensor(B, N, S, 8)), "want float32"),
        (attention_grad(attention_in=tensor(S, B, D)), "attention_in"),
        (attention_grad(attention_in=tensor(S, B, D), dy=tensor(S, B, D)), "dy is bfloat16[12, 2, 16]"),
        (attention_grad(dy=tensor(S, B, N * D, dtype="float32")), "dy is float32"),
        (attention_grad(keep_prob=0.0), "probability to keep"),
        (attention_grad(query=tensor(S, B, 6 * D), head_num=6, key=tensor(S, B, 4 * D), value=tensor(S, B, 4 * D)),
         "4 key heads do not divide 6"),
        (attention(sparse_mode=1, atten_mask=tensor(T, T, dtype="bool")), "no contract yet in layout TND"),
        (attention_grad(actual_seq_qlen=[S]), "belongs to layout TND"),
        (norm_backward(rstd=tensor(S, B, dtype="float32")), "rstd"),
        (norm_backward(rstd=tensor(S, B, 1)), "want float32"),
        (grouped_matmul(group_list=groups(4, 12, 24)), "are not counts"),
        (grouped_matmul(group_list_type=0), "not cumulative to 24"),
        (grouped_matmul(group_list=groups(0, 12, 24), group_list_type=0), "leading zero"),
        (grouped_matmul(group_list=[4, 8, 12]), "want int64[3]"),
        (grouped_matmul(weight=[tensor(3, 7, 5)]), "do not fit"),
        (grouped_matmul(weight=[tensor(3, 8, 5, dtype="float16")]), "want one dtype"),
        (grouped_matmul(split_item=0), "split_item is 0"),
        (Call("npu_nothing", {}), "npu_nothing has no contract"),
    ],
)  # fmt: skip
def test_wrong_calls_do_not(call: Call, words: str) -> None:
    assert any(words in violation for violation in violations(call)), violations(call)


def test_ends_for_the_cumulative_kind_pass() -> None:
    assert violations(grouped_matmul(group_list=groups(4, 12, 24), group_list_type=0)) == []


def test_what_is_visible() -> None:
    """By hand, for two queries and three keys: the second query stands at the last key."""

    def seen(**changed: Any) -> list[list[int]] | None:
        call = attention(
            query=tensor(2, 1, 16), key=tensor(3, 1, 16), value=tensor(3, 1, 16), head_num=1, input_layout="SBH",
            actual_seq_qlen=None, actual_seq_kvlen=None, **changed,
        )  # fmt: skip
        found = visible_to(call)
        return None if found is None else found[0, 0].int().tolist()

    full = tensor(2, 3, dtype="bool", content=[[0, 0, 1], [1, 0, 0]])
    assert seen(sparse_mode=2) == [[1, 0, 0], [1, 1, 0]]
    assert seen(sparse_mode=3) == [[1, 1, 0], [1, 1, 1]]
    assert seen(sparse_mode=4, pre_tockens=0, next_tockens=0) == [[0, 1, 0], [0, 0, 1]]
    assert seen(sparse_mode=4, pre_tockens=1, next_tockens=1) == [[1, 1, 1], [0, 1, 1]]
    assert seen(sparse_mode=1, atten_mask=full) == [[1, 1, 0], [0, 1, 1]]
    assert seen(sparse_mode=0, atten_mask=full, next_tockens=0) == [[1, 0, 0], [0, 1, 0]]
    assert seen(sparse_mode=0, atten_mask=None) == [[1, 1, 1], [1, 1, 1]]
    assert seen(sparse_mode=2, atten_mask=tensor(2048, 2048, dtype="bool", content="other")) is None
    assert seen(sparse_mode=1, atten_mask=tensor(2, 3, dtype="bool")) is None


def test_a_call_survives_json() -> None:
    for call in (attention(), grouped_matmul()):
        assert from_json(to_json(call)) == call


def test_an_argument_that_is_not_there_cannot_be_changed() -> None:
    with pytest.raises(KeyError, match="eps"):
        norm_backward(eps=1e-5)
