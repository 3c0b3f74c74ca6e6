"""`--recompute-norm` in real Megatron: the same bits in bf16, and exactly the memory that arithmetic gives."""

from __future__ import annotations

import pytest
import torch

import mindspeed_lite
from mindspeed_lite.patches import recompute_norm
from tests.harness.compare import error
from tests.harness.gpt_block import BATCH, HIDDEN, LAYERS, SEQUENCE, keeping, model_of, same, size_without, step
from tests.harness.processes import forked

ON = {"recompute_norm": True, "strict": True}
TWO = 2 * 2 * SEQUENCE * BATCH * HIDDEN


@pytest.mark.parametrize("number", [None, 1])
@pytest.mark.parametrize("norm", [{}, {"use_fused_rmsnorm": True}], ids=["torch", "fused"])
@forked("megatron")
def test_two_norms_for_each_layer_are_not_kept(norm, number):
    with mindspeed_lite.enabled(**norm):
        off = step(model_of())
        layer = model_of().layers[0].input_layernorm
        x = torch.randn(SEQUENCE, BATCH, HIDDEN).bfloat16().requires_grad_()
        with keeping() as kept:
            out = layer(x)
        inside = size_without(kept, [x, out, *layer.parameters()])
    flags = {**ON, **norm, **({} if number is None else {"recompute_norm_num_layers": number})}
    with mindspeed_lite.enabled(**flags):
        on = step(model_of())
    # Ours keeps the input and the reciprocal of each row's root mean square; torch's copies in fp32 and not the input,
    # which is kept in their place then.
    instead = 0 if norm else TWO
    assert off[0] - on[0] == (number or LAYERS) * (TWO + 2 * inside - instead)
    assert inside == 4 * SEQUENCE * BATCH if norm else inside > TWO
    assert same(on, off)


@forked("megatron")
def test_in_fp32_the_gradients_of_torchs_norm_add_up_in_another_order():
    """Its input has two of them, beside the residual's; in bf16 they are one."""

    def gradients():
        model = model_of(bf16=False, params_dtype=torch.float32).float()
        x = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=torch.Generator().manual_seed(2)).requires_grad_()
        out = model(x, attention_mask=None)
        out.square().sum().backward()
        return [x.grad, *(each.grad for each in model.parameters())]

    off = gradients()
    with mindspeed_lite.enabled(**ON):
        on = gradients()
    assert recompute_norm.FEATURE.numerics == "ulp"
    assert all(error(a, b) < 1e-6 for a, b in zip(on, off, strict=True))


@forked("megatron")
def test_a_recomputed_output_gets_its_storage_back_without_a_compiler():
    from megatron.core.tensor_parallel import random

    from mindspeed_lite import platform

    platform.activate()
    output, again = torch.zeros(4, 8), torch.randn(4, 8)
    view, values = output[1:], again.clone()
    output.untyped_storage().resize_(0)
    random._get_share_storage()(output, again)
    assert torch.equal(output, values) and torch.equal(view, values[1:]) and output._version == 0
    assert again.data_ptr() == output.data_ptr(), "one memory for both"
    assert random._share_storage_ext is None, "nothing was compiled"
