"""The tensors that training keeps of a parameter, in each of Megatron's optimizers and in forms of ours."""

from __future__ import annotations

import pytest
import torch

from tests.harness import optimizers
from tests.harness.processes import forked

FORMS = {
    "plain": {},
    "quantized": {"use_fused_adamw": True, "quant_states": "fp8"},
    "split": {"use_fused_adamw": True, "quant_states": "bf16", "reuse_fp32_param": True},
}


@pytest.mark.parametrize("form", [*FORMS])
@pytest.mark.parametrize("kind", ["bf16", "bf16, distributed", "fp32"])
@forked("megatron")
def test_every_tensor_of_a_parameter_is_there_once_and_may_be_written(tmp_path, kind, form):
    import mindspeed_lite
    from mindspeed_lite.patches._shared.training_state import leaves, main_params, training_state

    flags = {name: value for name, value in FORMS[form].items() if kind != "fp32" or name != "reuse_fp32_param"}
    optimizers.start(tmp_path / "store")
    with mindspeed_lite.enabled(**flags):
        model, optimizer = optimizers.optimizer_of(**optimizers.KINDS[kind])
        optimizers.gradients(model, 1)
        optimizer.step()
        mains = main_params(leaves(optimizer))
        parameters = [*model.parameters()]
        assert {*mains} == {*parameters}
        for parameter in parameters:
            is_copied = parameter.dtype == torch.bfloat16
            with training_state([parameter], mains) as found:
                assert len(found) == 3 + is_copied and found[0] is parameter
                assert all(each.numel() == parameter.numel() and each.isfinite().all() for each in found)
                assert all(each.dtype == torch.float32 for each in found[1:])
                if is_copied:
                    assert torch.equal(found[1].view_as(parameter).bfloat16(), parameter)
                before = [each.detach().clone() for each in found]
            with training_state([parameter], mains) as found, torch.no_grad():
                # What was read is written back as the same numbers.
                assert all(map(torch.equal, found, before))
                for each in found:
                    each.copy_(-each if each is not found[-1] else 2 * each)
            with training_state([parameter], mains) as found:
                assert all(torch.equal(each, -other) for each, other in zip(found[:-1], before[:-1], strict=True))
                assert torch.equal(found[-1], 2 * before[-1])
