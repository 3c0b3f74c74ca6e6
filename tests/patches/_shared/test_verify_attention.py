"""What `--mindspeed-lite-verify` compares for attention where Megatron's own path cannot compute the call."""

from __future__ import annotations

import pytest
import torch

import mindspeed_lite
from mindspeed_lite.verify import VerifyError
from tests.harness.attention_modules import inputs_of, module_of, pack_of
from tests.harness.processes import forked


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
