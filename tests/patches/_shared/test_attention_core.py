"""Reading a call off Megatron's core attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mindspeed_lite.patches._shared import attention_core
from tests.harness.attention_modules import HEADS, SIZE, module_of, padding_mask
from tests.harness.processes import forked


@forked("megatron")
def test_a_call_is_read_off_the_module():
    q = torch.zeros(24, 2, HEADS, SIZE)
    call = attention_core.read_call(module_of(), q, None, False)
    assert call.causal and call.mask is None and call.window is None and call.scale == SIZE**-0.5
    assert not attention_core.read_call(module_of(), q[:1], None, False).causal
    mask = padding_mask()
    call = attention_core.read_call(module_of(attention_dropout=0.1), q, mask, False)
    assert not call.causal and call.mask is mask and call.dropout_p == 0.1
    call = attention_core.read_call(module_of(window_size=(8, 0)), q, mask, False)
    assert call.window == (8, 0) and call.mask is None and not call.causal
    assert attention_core.read_call(module_of(mask_type="padding_causal"), q, mask, True).causal
    assert not attention_core.read_call(module_of(mask_type="padding"), q, mask, True).causal


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
