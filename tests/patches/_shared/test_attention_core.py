"""Reading a call off Megatron's core attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import mindspeed_lite
from mindspeed_lite.patches._shared import attention_core
from mindspeed_lite.verify import VerifyError
from tests.harness.attention_modules import HEADS, SIZE, inputs_of, module_of, pack_of, padding_mask
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


def run(packed=False, dtype=torch.float32, size=16, value=16, **fields):
    qkv, _ = inputs_of(dtype, size=size, value=value)
    params = pack_of(9, 15) if packed else None
    qkv = [(t[:, 0] if packed else t).detach().requires_grad_() for t in qkv]
    return module_of(dtype, **fields)(*qkv, None, packed_seq_params=params)


@pytest.mark.parametrize(
    ("call", "variant", "against"),
    [
        ({"packed": True}, "causal packed", "DotProductAttention, one sequence after the other"),
        ({"packed": True, "softmax_type": "off-by-one"}, "causal packed offset", "one sequence after the other"),
        ({"packed": True, "value": 8}, "causal packed", "plain definition"),
        ({"softmax_type": "off-by-one"}, "causal offset", "Megatron's DotProductAttention"),
        ({"size": 24, "value": 8}, "causal", "plain definition"),
    ],
)
@forked("megatron")
def test_every_call_is_compared(call, variant, against):
    mindspeed_lite.enable(use_flash_attn=True, verify=2, strict=True)
    for dtype in (torch.float32, torch.bfloat16):
        run(dtype=dtype, **call)
    for entry in mindspeed_lite.report().verifications:
        assert entry.verdict == "ok" and entry.measured_from != "original"
        assert entry.shape.endswith(f"] {variant}") and against in entry.against
        # In bf16 both may round to the same numbers.
        assert "bfloat16" in entry.shape or (entry.output_error > 0 and entry.gradient_error > 0)


@pytest.mark.parametrize("call", [{"packed": True}, {"softmax_type": "off-by-one"}, {"size": 24, "value": 8}], ids=str)
@forked("megatron")
def test_a_planted_fault_is_found(call):
    from mindspeed_lite.patches import use_flash_attn as patch

    attend, packs = patch.attend, patch.packed.attend
    patch.attend = lambda *given: (attend(*given)[0] * 1.01, None)
    patch.packed.attend = lambda *given: (packs(*given)[0] * 1.01, None)
    mindspeed_lite.enable(use_flash_attn=True, verify=1, strict=True)
    with pytest.raises(VerifyError, match="--use-flash-attn"):
        run(**call)
