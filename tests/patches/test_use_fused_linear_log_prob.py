"""`--use-fused-linear-log-prob` on against off in `get_logprobs`.

MEGATRON_LM=CHECKOUT pytest ...    in Megatron's own function, instead of a stand-in
"""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist

import mindspeed_lite
from mindspeed_lite.engine import FallbackError
from tests.harness.compare import Sizes
from tests.harness.processes import forked, on_ranks
from tests.patches.output_layer import CHECKOUT, assert_near, model_of, ready, rl_utils

# Megatron's own passes a pack, which is one row and which its local attention does not take.
ROWS, BOTH = (1, {"use_flash_attn": True}) if CHECKOUT else (2, {})
ON = {"use_fused_linear_log_prob": True, "allow_unverified": not CHECKOUT, **BOTH}
SIZE = 64


def wrapped(**options):
    """The module, and a model as Megatron's script wraps it."""
    from megatron.core.transformer.module import Float16Module

    module = rl_utils()
    if BOTH:
        mindspeed_lite.enable(**BOTH)
    model = model_of(**options)
    return module, Float16Module(model.config, model)


def tokens():
    return torch.randint(0, 256, (ROWS, SIZE), generator=torch.Generator().manual_seed(3))


def log_prob(module, model, no_grad=False):
    return module.get_logprobs(model, tokens(), torch.arange(SIZE).repeat(ROWS, 1), no_grad=no_grad)


def reasons():
    return [each.reason for each in mindspeed_lite.report().fallbacks if each.feature == "use_fused_linear_log_prob"]


def weights():
    return torch.linspace(0.5, 1.5, ROWS * (SIZE - 1)).view(ROWS, SIZE - 1)


def step(module, model, sizes=None):
    """The log-probabilities and every parameter's gradient."""
    model.zero_grad(set_to_none=True)
    with sizes or Sizes():
        found = log_prob(module, model)
        (found * weights()).sum().backward()
    return found.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("kind", ["", "tied", "frozen"])
@forked("megatron")
def test_log_probabilities_and_gradients_are_those_of_the_logits(kind):
    from mindspeed_lite.ops.linear_cross_entropy import chunks

    ready()
    chunks.KEPT_BYTES = 0
    module, model = wrapped(tied=kind == "tied", vocabulary=4096)
    if kind == "frozen":
        model.module.output_layer.requires_grad_(False)
    off = step(module, model, theirs := Sizes())
    with mindspeed_lite.enabled(**ON):
        on = step(module, model, ours := Sizes())
        alone = log_prob(module, model, no_grad=True)
        assert reasons() == []
    # Both round to bf16; gradients are sums in another order.
    assert_near(on, off)
    assert not torch.equal(on[0], off[0]) or not torch.equal(on[1].popitem()[1], off[1].popitem()[1]), "Megatron's ran"
    assert torch.equal(alone, on[0]) and not alone.requires_grad and alone.dtype == off[0].dtype
    assert theirs.largest >= 2 * ROWS * SIZE * 4096 >= 2 * ours.largest, "logits"
    assert "forward" not in vars(model.module.output_layer)
    assert torch.equal(step(module, model)[0], off[0]), "undone"


def split(rank, store, sequence_parallel):
    ready(rank, 2, dist.FileStore(store, 2))
    module, model = wrapped(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    off = step(module, model)
    with mindspeed_lite.enabled(**ON):
        on = step(module, model)
        assert reasons() == []
    assert_near(on, off)
    assert not torch.equal(on[0], off[0]) or any(not torch.equal(on[1][name], each) for name, each in off[1].items())


@pytest.mark.parametrize("sequence_parallel", [False, True])
@forked("megatron")
def test_two_ranks_with_half_of_the_vocabulary_gather_no_logits(sequence_parallel):
    store = tempfile.mkdtemp() + "/store"
    on_ranks(2, lambda rank: split(rank, store, sequence_parallel))


def staged(rank, store):
    from megatron.core import parallel_state

    ready(rank, 2, dist.FileStore(store, 2))
    parallel_state.initialize_model_parallel(1, 2)
    module, model = wrapped(pipeline_model_parallel_size=2, pipeline_dtype=torch.bfloat16, stage=rank)

    def step():
        model.zero_grad(set_to_none=True)
        hidden = torch.empty(SIZE, ROWS, 32, dtype=torch.bfloat16)
        if rank == 0:
            found = log_prob(module, model)
            dist.send(found.detach().contiguous(), 1)
            dist.recv(hidden, 1)
            found.backward(hidden)
        else:
            dist.recv(hidden, 0)
            model.module.set_input_tensor(hidden.requires_grad_())
            found = log_prob(module, model)
            (found * weights()).sum().backward()
            dist.send(hidden.grad, 0)
        return found.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}

    off = step()
    with mindspeed_lite.enabled(**ON):
        on = step()
        assert reasons() == []
    assert_near(on, off)
    if rank == 0:
        assert torch.equal(on[0], off[0]), "hidden states of a stage without output layer"


@forked("megatron")
def test_a_stage_without_output_layer_is_left_alone():
    store = tempfile.mkdtemp() + "/store"
    on_ranks(2, lambda rank: staged(rank, store))


@forked("megatron")
def test_what_needs_logits_is_left_to_megatron():
    ready()
    module, plain = wrapped()
    layer = plain.module.output_layer
    adapted = torch.nn.Module()
    adapted.forward = layer.forward
    hooks = []

    def invariant():
        plain.config.batch_invariant_mode = True

    def hooked():
        plain.module.output_layer = layer
        plain.config.batch_invariant_mode = False
        hooks.append(layer.register_forward_hook(lambda *given: None))

    cases = [
        ("--batch-invariant-mode", plain, invariant),
        (
            "a Module, not Megatron's ColumnParallelLinear",
            plain,
            lambda: setattr(plain.module, "output_layer", adapted),
        ),
        ("a hook looks at", plain, hooked),
    ]
    if not CHECKOUT:  # main builds no such layers without Transformer Engine
        cases.append(("multi-token prediction", wrapped(mtp=True)[1], lambda: None))
    for words, model, change in cases:
        off = log_prob(module, model)
        change()
        with mindspeed_lite.enabled(**ON):
            assert torch.equal(log_prob(module, model), off), words
            assert words in reasons()[-1]
        with mindspeed_lite.enabled(**ON, strict=True), pytest.raises(FallbackError):
            log_prob(module, model)


def test_another_use_of_the_logits_is_one_clear_line():
    from mindspeed_lite.patches.use_fused_linear_log_prob import DeferredLogits

    with pytest.raises(TypeError, match=r"--use-fused-linear-log-prob has no logits, .*: omit it"):
        DeferredLogits(None, True)[:, 0]
