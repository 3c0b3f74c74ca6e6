"""Which keys an attention call hides, by hand."""

from __future__ import annotations

from typing import Any

from tests.npu_contract.attention_calls import UNLIMITED, visible_to
from tests.npu_contract.recorder import Call, Tensor


def tensor(*shape: int, dtype: str = "bfloat16", content: Any = None) -> Tensor:
    return Tensor(dtype, shape, "npu", True, content)


def test_what_is_visible() -> None:
    """For two queries and three keys: the second query stands at the last key."""
    keys, triangle = tensor(3, 1, 16), tensor(2048, 2048, dtype="bool", content="triangle")
    call = Call("npu_fusion_attention", {
        "query": tensor(2, 1, 16), "key": keys, "value": keys, "head_num": 1, "input_layout": "SBH",
        "atten_mask": triangle, "pre_tockens": UNLIMITED, "next_tockens": UNLIMITED, "actual_seq_qlen": None,
        "actual_seq_kvlen": None, "sparse_mode": 3,
    })  # fmt: skip

    def seen(**changed: Any) -> list[list[int]] | None:
        found = visible_to(call.changed(**changed))
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
