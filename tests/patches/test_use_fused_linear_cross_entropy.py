"""`--use-fused-linear-cross-entropy` in real Megatron: GPT's losses and gradients on against off, and no logits."""

from __future__ import annotations

import tempfile

import pytest
import torch

import mindspeed_lite
from mindspeed_lite.engine import FallbackError
from mindspeed_lite.patches import use_fused_linear_cross_entropy as patch
from tests.harness.compare import Sizes
from tests.harness.errors import error
from tests.harness.processes import forked
from tests.patches.output_layer import assert_near, model_of, ready


def step(model, names=None):
    """The losses [b, s] and every parameter's gradient for one small batch."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 256, (2, 17), generator=generator)
    model.zero_grad(set_to_none=True)
    with Sizes() as sizes:
        losses = model(tokens[:, :-1], torch.arange(16).repeat(2, 1), None, labels=tokens[:, 1:])
        (losses * torch.linspace(0.5, 1.5, 32).view(2, 16)).sum().backward()
    if names is not None:
        names.append(sizes.largest)
    return losses.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@forked("megatron")
def test_losses_and_gradients_are_those_of_the_layer_and_the_loss(tied, dtype):
    ready()
    model = model_of(tied=tied, dtype=dtype)
    off = step(model)
    with mindspeed_lite.enabled(use_fused_linear_cross_entropy=True):
        on = step(model)
        assert mindspeed_lite.report().fallbacks == []
    assert_near(on, off, dtype)
    assert not torch.equal(on[0], off[0]), "Megatron's own loss ran"
    assert "_forward_impl" not in vars(model.output_layer)


@forked("megatron")
def test_logits_beyond_the_budget_are_never_in_memory():
    from mindspeed_lite.ops.linear_cross_entropy import chunks

    ready()
    chunks.KEPT_BYTES = 0
    model = model_of(vocabulary=4096)
    off, on = [], []
    step(model, off)
    with mindspeed_lite.enabled(use_fused_linear_cross_entropy=True):
        step(model, on)
    logits, weight = 32 * 4096, 32 * 4096  # tokens, hidden size
    assert off[0] == logits * 4, "Megatron's are in fp32"
    assert on[0] == weight * 2, "the largest is a gradient of a weight"


@forked("megatron")
def test_multi_token_prediction_uses_it_for_each_of_its_losses_where_nobody_else_wants_the_logits():
    from megatron.core.transformer import multi_token_prediction

    ready()
    model = model_of(mtp=True)
    off = step(model)
    calls = []
    with mindspeed_lite.enabled(use_fused_linear_cross_entropy=True):
        loss, patch.Deferred.loss = patch.Deferred.loss, lambda *given: calls.append(1) or loss(*given)
        on = step(model)
        said = [each.reason for each in mindspeed_lite.report().fallbacks]
    if hasattr(multi_token_prediction, "_compute_mtp_acceptance_counts"):  # since 0.19
        assert calls == [] and len(said) == 1 and "accepted" in said[0]
    else:
        assert len(calls) == 2 and said == []
    assert_near(on, off)


@pytest.mark.parametrize("zero_out", [False, True])
@forked("megatron")
def test_gradient_accumulation_fusion_adds_to_the_main_gradient_itself(zero_out):
    ready()
    model = model_of()
    _, gradients = step(model)
    expected = gradients["output_layer.weight"]
    weight = model.output_layer.weight
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(weight.shape), False
    weight.zero_out_wgrad = zero_out
    model.output_layer.gradient_accumulation_fusion = True
    with mindspeed_lite.enabled(use_fused_linear_cross_entropy=True):
        for number in (1, 2):
            _, gradients = step(model)
            assert error(weight.main_grad - 1, number * expected.float()) <= 0.02
    assert weight.grad_added_to_main_grad
    dummy = gradients["output_layer.weight"]
    assert dummy.shape == weight.shape, "hooks that count gradients want one"
    assert not zero_out or not dummy.any()


@forked("megatron")
def test_without_labels_there_are_logits():
    ready()
    model = model_of()
    tokens = torch.arange(32).view(2, 16)
    off = model(tokens, torch.arange(16).repeat(2, 1), None)
    with mindspeed_lite.enabled(use_fused_linear_cross_entropy=True, strict=True):
        on = model(tokens, torch.arange(16).repeat(2, 1), None)
    assert torch.equal(on, off) and on.shape == (2, 16, 256)


@forked("megatron")
def test_a_call_that_needs_its_logits_is_left_to_megatron():
    ready()
    model = model_of()
    off = step(model)

    def said(words, change, back):
        change()
        with mindspeed_lite.enabled(use_fused_linear_cross_entropy=True):
            on = step(model)
            (fallback,) = mindspeed_lite.report().fallbacks
        with mindspeed_lite.enabled(use_fused_linear_cross_entropy=True, strict=True), pytest.raises(FallbackError):
            step(model)
        back()
        assert words in fallback.reason and torch.equal(on[0], off[0])

    seen = []
    handles = []
    said(
        "a hook looks at",
        lambda: handles.append(model.output_layer.register_forward_hook(lambda *given: seen.append(given[2][0].shape))),
        lambda: handles.pop().remove(),
    )
    assert set(seen) == {(16, 2, 256)}
    own = model.compute_language_model_loss
    said(
        "a loss of its own",
        lambda: setattr(model, "compute_language_model_loss", own),
        lambda: delattr(model, "compute_language_model_loss"),
    )
    for name, value, words in (
        ("config_logger_dir", tempfile.mkdtemp(), "--config-logger-dir"),
        ("use_mup", True, "--use-mup"),
    ):
        before = getattr(model.config, name)
        said(words, lambda: setattr(model.config, name, value), lambda: setattr(model.config, name, before))  # noqa: B023
