"""Reading a call off Megatron's core attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mindspeed_lite.patches._shared import attention_core


@pytest.mark.parametrize(
    ("fields", "dims", "word"),
    [
        ({"qkv_format": "bshd"}, 3, "format bshd"),
        ({"qkv_format": "thd"}, 4, "4 dimensions"),
        ({"qkv_format": "thd", "cu_seqlens_q": None}, 3, "without cu_seqlens_q"),
    ],
)
def test_what_keeps_a_pack_away_is_named(fields, dims, word):
    pytest.importorskip("megatron.core")
    module = SimpleNamespace(attn_mask_type=None)
    params = SimpleNamespace(**{"cu_seqlens_q": 1, "cu_seqlens_kv": 1, **fields})
    (reason,) = attention_core.pack_reasons(module, torch.zeros([1] * dims), params)
    assert word in reason
