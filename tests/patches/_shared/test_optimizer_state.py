"""Optimizers of Megatron with state in other forms: the same training, bytes, checkpoints, and what is compared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mindspeed_lite
from mindspeed_lite.engine import EngineError
from mindspeed_lite.memory import host_mapped_moments
from mindspeed_lite.optim.fused_adam import FusedAdam, FusedAdamW, StepData
from mindspeed_lite.optim.quantized_moments import QuantizedMoments
from mindspeed_lite.optim.split_params import SplitFP32Params
from mindspeed_lite.patches._shared import optimizer_state as forms
from tests.harness import matrix, optimizers, simulated
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


FUSED = {"use_fused_adamw": True, "strict": True}
SPLIT = {"reuse_fp32_param": True}
SWAP = {"swap_optimizer": True, "swap_optimizer_times": 3}
HOST = {"virtual_optimizer": ("all",)}
BOTH = {"quant_states": "fp8", **SPLIT}
# Feature: its flags, kinds of optimizers, and flags of both trainings.
TRAININGS = [
    *((FUSED, kind, {}) for kind in optimizers.KINDS),
    *((SPLIT, kind, {}) for kind in optimizers.KINDS if kind not in ("fp32", "fp16", "fp16, distributed")),
    *((SWAP, kind, more) for kind, more in (
        ("bf16", {}), ("bf16, distributed", {"quant_states": "bf16", **SPLIT}), ("fp16", {}),
        ("fp32", {"quant_states": "fp8"}),
    )),
    *((HOST, kind, {}) for kind in ("bf16", "bf16, distributed", "fp32", "fp16")),
    *((HOST, kind, BOTH) for kind in ("bf16", "bf16, distributed")),
]  # fmt: skip
MORE = [(SWAP, kind, more) for kind in optimizers.KINDS for more in ({"quant_states": "fp8"}, BOTH)
        if kind.startswith("bf16") or more is not BOTH]  # fmt: skip


def begin(folder: Any) -> None:
    simulated.swap_optimizer(bandwidth=1e8)
    # The models of these tests are small.
    host_mapped_moments._SMALLEST = 64
    optimizers.start(folder / "store")


@pytest.mark.parametrize(("flags", "kind", "more"), matrix.only(TRAININGS, [*TRAININGS, *MORE]))
@forked("megatron")
def test_training_has_the_same_bits(tmp_path, flags, kind, more):
    """As Megatron's own, and where they start from the fused step as that; a step that overflows is skipped."""
    begin(tmp_path)
    overflow = 2 if kind.startswith(("fp16", "constant")) else None
    references = [{}] if flags == FUSED else [{}, FUSED] if flags == SPLIT else [FUSED]
    with mindspeed_lite.enabled(**{**flags, **more, "strict": True}):
        on = optimizers.train(optimizers.KINDS[kind], overflow=overflow)
    assert on["kind"] is (FusedAdam if kind == "L2" else FusedAdamW)
    assert [done for done, _, _ in on["history"]] == [step != overflow for step in range(6)]
    for reference in references:
        with mindspeed_lite.enabled(**reference, **more):
            off = optimizers.train(optimizers.KINDS[kind], overflow=overflow)
        # The second moment's sign is part of a split parameter.
        for name in ("history", "model", "scale", *(() if flags == SPLIT else ("main", "state"))):
            optimizers.assert_equal(on[name], off[name], name)


@pytest.mark.parametrize("flags", [SPLIT, SWAP], ids=str)
@pytest.mark.parametrize("kind", ["bf16", "bf16, distributed"])
@forked("megatron")
def test_weights_that_are_loaded_become_the_main_parameters(tmp_path, kind, flags):
    begin(tmp_path)
    ended = []
    for each in (FUSED, {**flags, "strict": True}):
        with mindspeed_lite.enabled(**each):
            model, optimizer = optimizers.optimizer_of(**optimizers.KINDS[kind])
            optimizers.gradients(model, 0)
            optimizer.step()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(parameter * 0.5 + 0.1)
            optimizer.reload_model_params()
            optimizers.gradients(model, 1)
            optimizer.step()
            # A step that is torch's own, and the copy that it leaves to Megatron.
            own = optimizers.inner(optimizer)
            for group in own.param_groups:
                group["maximize"] = True
            optimizers.gradients(model, 2)
            with pytest.raises(EngineError, match="maximize is set"):
                optimizer.step()
            own.on_fallback = None
            optimizer.step()
            ended.append(optimizers.saved(model, optimizer))
    optimizers.assert_equal(*ended)


@pytest.mark.parametrize("flags", [FUSED, {}], ids=["on to off", "off to on"])
@pytest.mark.parametrize("kind", ["bf16", "bf16, distributed", "fp32"])
@forked("megatron")
def test_checkpoints_go_on_with_and_without(tmp_path, kind, flags):
    optimizers.start(tmp_path / "store")
    if "distributed" in kind:
        optimizers.Model = optimizers.Narrow  # in this fork: Megatron mixes up groups with fp32 and bf16
    options, ended = optimizers.KINDS[kind], []
    for first, second in (({}, {}), (flags, {} if flags else FUSED)):
        with mindspeed_lite.enabled(**first):
            written = optimizers.steps(options, 0, None)
        with mindspeed_lite.enabled(**second):
            ended.append(optimizers.steps(options, 3, written))
    optimizers.assert_equal(*ended)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize(("form", "moments"), [(None, 8), ("bf16", 4), ("fp8", 2)])
@forked("megatron")
def test_a_parameter_takes_as_many_bytes_as_is_said(tmp_path, form, moments, shares):
    """Of 18: moments in 2 or 1 bytes for 4, and a bf16 weight that is half of its main parameter."""
    optimizers.start(tmp_path / "store")
    with mindspeed_lite.enabled(use_fused_adamw=True, quant_states=form, reuse_fp32_param=shares, strict=True):
        model, optimizer = optimizers.optimizer_of(**optimizers.KINDS["bf16"])
        optimizers.gradients(model, 0)
        optimizer.step()
        own = optimizers.inner(optimizer)
        sizes = [each.numel() for each in optimizer.get_parameters()]
        narrow = sum(each.numel() for each in model.parameters() if each.dtype == torch.bfloat16)
        # Gradient buffers are padded.
        expected = sum(buffer.grad_data.nbytes for buffer in model.buffers) + moments * sum(sizes)
        placeholders = 4 * len(own.split_params.halves()) if shares else 0
        expected += (4 * narrow + placeholders if shares else 6 * narrow) + 4 * (sum(sizes) - narrow)
        if form == "fp8":
            pairs = [own.quantized_moments.blocks(main) for main in optimizer.get_parameters()]
            exponents = sum(each.nbytes for pair in pairs for each in pair)
            assert exponents == sum(2 * -(-size // 128) for size in sizes)
        assert optimizers.live_bytes(model, optimizer) == expected


@pytest.mark.parametrize("flags", [SPLIT, {"quant_states": "bf16"}, {"quant_states": "fp8"}], ids=str)
@forked("megatron")
def test_verify_compares_what_the_stored_form_stands_for(tmp_path, flags):
    optimizers.start(tmp_path / "store")
    mindspeed_lite.enable(**flags, strict=True, verify=2)
    optimizers.train(optimizers.KINDS["bf16"], 3)
    verdicts = {entry.operator: entry.verdict for entry in mindspeed_lite.report().verifications}
    assert verdicts["adamw"] == "ok"


# Flags of a training, and of blocks within it, which change where state is and not what it is. An optimizer that was
# built without any such feature is left alone.
NESTED: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({**FUSED, "quant_states": "bf16"}, [SPLIT, SWAP, {**SPLIT, **SWAP}, HOST]),
    ({**FUSED, **SWAP}, [SPLIT, {"verify": 1}, {"swap_optimizer_times": 2}]),
    ({**FUSED, **SPLIT}, [SWAP, HOST, {}]),
]


@pytest.mark.parametrize("kind", ["bf16", "bf16, distributed"])
@forked("megatron")
def test_blocks_that_begin_and_end_leave_every_bit(tmp_path, kind):
    """Live optimizers get the forms of the features that are on, and what an outer block has stays."""
    begin(tmp_path)

    def states(inner: Any) -> set[str]:
        return {name for name in ("placement", "split_params", "quantized_moments") if getattr(inner, name) is not None}

    for outer, blocks in NESTED:
        kept = []
        for nested in (False, True):
            with mindspeed_lite.enabled(**outer):
                model, optimizer = optimizers.optimizer_of(**optimizers.KINDS[kind])
                own = states(optimizers.inner(optimizer))
                for number, flags in enumerate(blocks):
                    optimizers.gradients(model, 2 * number)
                    optimizer.step()
                    with mindspeed_lite.enabled(**(flags if nested else {})):
                        found = states(optimizers.inner(optimizer))
                        assert not nested or "reuse_fp32_param" not in flags or "split_params" in found
                        assert (
                            not nested or not {*flags} & {"swap_optimizer", "virtual_optimizer"} or "placement" in found
                        )
                        optimizers.gradients(model, 2 * number + 1)
                        optimizer.step()
                    assert states(optimizers.inner(optimizer)) == own
                kept.append(optimizers.saved(model, optimizer))
        optimizers.assert_equal(*kept)
