"""Checkpoints of optimizers with numbers in other forms, on a stand-in: plain, and what is applied twice is once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_lite.optim.fused_adam import FusedAdamW, StepData
from mindspeed_lite.optim.quantized_moments import QuantizedMoments
from mindspeed_lite.optim.split_params import SplitFP32Params
from mindspeed_lite.patches._shared import optimizer_state as forms
from tests.harness import optimizers
from tests.harness.processes import forked


def optimizer_of(shares: bool, narrow: bool) -> Any:
    """What has the attributes of Float16OptimizerWithFloat16Params, after a step."""
    main = torch.nn.Parameter(torch.randn(300, generator=torch.Generator().manual_seed(0)))
    inner = FusedAdamW([main], lr=0.1)
    if narrow:
        inner.quantized_moments = QuantizedMoments(inner, lambda parameter: torch.uint8)
    if shares:
        weight = main.detach().bfloat16()
        inner.split_params = SplitFP32Params(inner, lambda: {main: weight})
    main.grad = torch.ones(300)
    inner.step()
    return SimpleNamespace(optimizer=inner, fp32_from_float16_groups=[[main]])


def test_the_copy_of_main_parameters_is_made_once() -> None:
    optimizer, plain = optimizer_of(True, False), []

    def megatrons(self: Any) -> None:
        plain.append(bool(self.fp32_from_float16_groups[0][0].isfinite().all()))

    copy = forms.copy_main(megatrons, None)  # type: ignore[arg-type]
    assert optimizer.optimizer.step_data.casts_done, "by its step"
    copy(optimizer)
    assert plain == []
    optimizer.optimizer.step_data = StepData()
    copy(optimizer)
    assert plain == [True]
    copy(SimpleNamespace(optimizer=None, fp32_from_float16_groups=[[torch.ones(2)]]))
    assert plain == [True, True], "of another optimizer it is Megatron's own"


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
    from mindspeed_lite.patches._shared.optimizer_state import leaves, main_params, training_state

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
