"""`--use-fused-cross-entropy` in real Megatron: its two loss functions, on against off, and its logits."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist

import mindspeed_lite
from tests.harness import losses
from tests.harness.compare import assert_not_worse, forward_backward
from tests.harness.processes import forked, on_ranks

ROWS, WIDTH = (6, 2), 64


def joined(rank=0, ranks=1, store=None):
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=store or dist.HashStore(), rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(ranks)
    return parallel_state.get_tensor_model_parallel_group()


def problem(dtype, ranks=1):
    """logits [s, b, K], target [s, b], dloss [s, b]; one token is masked as a padding would be."""
    generator = torch.Generator().manual_seed(2)
    logits = (3 * torch.randn(*ROWS, ranks * WIDTH, generator=generator)).to(dtype)
    target = torch.randint(0, ranks * WIDTH, ROWS, generator=generator)
    target[2, 1] = -100
    return logits, target, torch.rand(ROWS, generator=generator)


def functions(group):
    """Megatron's two functions, found where a model finds them now."""
    from megatron.core import tensor_parallel
    from megatron.core.models.common.language_module import language_module

    return {
        "unfused": lambda x, target: tensor_parallel.vocab_parallel_cross_entropy(x, target),
        "fused": lambda x, target: language_module.fused_vocab_parallel_cross_entropy(x, target, group),
    }


@forked("megatron")
def test_under_tensor_parallelism_every_rank_has_the_loss_of_the_whole():
    store = tempfile.mkdtemp() + "/store"

    def body(rank):
        group = joined(rank, 2, dist.FileStore(store, 2))
        for dtype in (torch.float32, torch.bfloat16):
            logits, target, dloss = problem(dtype, 2)
            mine = slice(rank * WIDTH, (rank + 1) * WIDTH)
            exact = forward_backward(lambda x: losses.cross_entropy(x, target), [logits], dloss, torch.float64)  # noqa: B023
            exact = [exact[0], exact[1][..., mine]]
            for which in ("unfused", "fused"):

                def run():
                    return forward_backward(
                        lambda x: functions(group)[which](x, target),  # noqa: B023
                        [logits[..., mine].contiguous()],  # noqa: B023
                        dloss,  # noqa: B023
                    )

                off = run()
                with mindspeed_lite.enabled(use_fused_cross_entropy=True):
                    assert_not_worse(run(), off, exact, 3e-7, ("loss", "dlogits"))

    on_ranks(2, body)


def model_of(**config):
    from tests.harness.core_loop import build

    (model,), _ = build({"config": config})
    return model


def step(model):
    """The losses [b, s] and every parameter's gradient of one small batch."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 256, (2, 33), generator=generator)
    positions = torch.arange(32).repeat(2, 1)
    losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
    losses.sum().backward()
    return losses.detach(), {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.parametrize("fused", [False, True])
@forked("megatron")
def test_a_models_gradient_is_written_over_its_logits(fused):
    """What the whole arrangement rests on: behind the output layer of a real GPT nobody else has the logits."""
    from mindspeed_lite.ops.cross_entropy import loss as op

    mindspeed_lite.enable()  # the device layer alone
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = model_of(cross_entropy_loss_fusion=fused)
    asked, is_unshared = [], op.is_unshared
    op.is_unshared = lambda references: asked.append(is_unshared(references)) or asked[-1]
    off, expected = step(model)
    model.zero_grad(set_to_none=True)
    with mindspeed_lite.enabled(use_fused_cross_entropy=True):
        on, gradients = step(model)
    assert asked == [True]
    torch.testing.assert_close(on, off, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0.05, atol=2e-3 * float(expected[name].abs().max()))
