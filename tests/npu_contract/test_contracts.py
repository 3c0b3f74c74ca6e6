"""The checks themselves: a right call passes, and one that is changed in one place does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.npu_contract.operators import violations
from tests.npu_contract.operators.attention import UNLIMITED
from tests.npu_contract.recorder import TRIANGLE, Call, Tensor


def tensor(*shape: int, dtype: str = "bfloat16", content: object = None) -> Tensor:
    return Tensor(dtype, shape, "npu", True, content)


X = tensor(6, 2, 64)
NORM = Call("npu_rms_norm", {"input": X, "gamma": tensor(64), "epsilon": 1e-5}, ("epsilon",),
            (X, tensor(6, 2, 1, dtype="float32")))  # fmt: skip
ROWS = {"query": tensor(24, 2, 256), "key": tensor(24, 2, 128), "value": tensor(24, 2, 128)}
REST = {"head_num": 4, "input_layout": "SBH", "keep_prob": 1.0, "pre_tockens": UNLIMITED, "next_tockens": UNLIMITED,
        "actual_seq_qlen": None, "actual_seq_kvlen": None, "sparse_mode": 2}  # fmt: skip
MASK = tensor(*TRIANGLE, dtype="bool", content="triangle")
ATTENTION = Call("npu_fusion_attention", {**ROWS, **REST, "atten_mask": MASK})
PACKED = {name: tensor(24, heads, 64) for name, heads in (("query", 4), ("key", 2), ("value", 2))}
ENDS = {"actual_seq_qlen": [10, 24], "actual_seq_kvlen": [10, 24]}
PACK = ATTENTION.changed(**PACKED, **ENDS, input_layout="TND", sparse_mode=3)
GROUPS = Call("npu_grouped_matmul", {
    "x": [tensor(6, 48)], "weight": [tensor(48, 32)] * 3, "bias": None, "split_item": 2, "group_type": 0,
    "group_list_type": 1, "group_list": tensor(3, dtype="int64", content=[4, 0, 2]),
})  # fmt: skip


def test_right_calls_are_right() -> None:
    assert [violations(each) for each in (NORM, ATTENTION, PACK, GROUPS)] == [[]] * 4


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (replace(NORM, named=()), "epsilon not passed by name"),
        (NORM.changed(gamma=tensor(64, dtype="float32")), "want one dtype"),
        (NORM.changed(input=tensor(64)), "want 2 to 8"),
        (replace(NORM, results=(X, tensor(6, 2, 1))), "result 1 (rstd)"),
        (replace(NORM, operator="npu_unknown"), "npu_unknown has no contract"),
        (ATTENTION.changed(head_num=3), "head_num 3 does not divide"),
        (ATTENTION.changed(atten_mask=tensor(24, 24, dtype="bool")), "takes the compressed mask"),
        (ATTENTION.changed(atten_mask=replace(MASK, content="other")), "is not the triangle"),
        (ATTENTION.changed(next_tockens=0), "mean nothing in sparse_mode 2"),
        (PACK.changed(actual_seq_qlen=[0, 10, 24]), "leading zero"),
        (PACK.changed(actual_seq_kvlen=[10, 20]), "not cumulative to 24"),
        (GROUPS.changed(x=[replace(tensor(6, 48), contiguous=False)]), "x is not contiguous"),
        (GROUPS.changed(group_list=tensor(3, dtype="int64", content=[4, 1, 2])), "not to 6 rows"),
    ],
)
def test_a_change_is_noticed(call: Call, words: str) -> None:
    assert any(words in each for each in violations(call)), violations(call)
