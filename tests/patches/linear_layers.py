"""Megatron's tensor-parallel linear layers: small ones, what a pass gives, and the messages it sends."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist

from tests.harness.process_groups import start
from tests.harness.processes import on_ranks

HIDDEN = 32


def on_tensor_ranks(ranks, body):
    """Run `body(rank)` on the ranks of a tensor-parallel group."""
    store = tempfile.mkdtemp() + "/store"

    def started(rank):
        start(ranks, rank, ranks, dist.FileStore(store, ranks))
        body(rank)

    on_ranks(ranks, started)


def config_of(fusion, **fields):
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, gradient_accumulation_fusion=fusion,
        add_bias_linear=False, bf16=True, params_dtype=torch.bfloat16, **fields,
    )  # fmt: skip


ON = {"use_ascend_coc": True, "coc_parallel_num": 2, "strict": True}


def messages(run):
    """Asynchronous messages that `run` sends through torch.distributed at run time, and its result."""
    sent = []
    kept = {name: getattr(dist, name) for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")}

    def counting(name):
        def collective(*args, **kwargs):
            if kwargs.get("async_op"):
                sent.append(name)
            return kept[name](*args, **kwargs)

        return collective

    for name in kept:
        setattr(dist, name, counting(name))
    try:
        return run(), sent
    finally:
        for name, original in kept.items():
            setattr(dist, name, original)


def layer_of(kind, config, **fields):
    from megatron.core import tensor_parallel

    fields = {"bias": True, "skip_bias_add": False, **fields}
    if kind == "column":
        made = tensor_parallel.ColumnParallelLinear(
            HIDDEN, 24, config=config, init_method=torch.nn.init.normal_, **{"gather_output": False, **fields}
        )
    else:
        made = tensor_parallel.RowParallelLinear(
            24, HIDDEN, config=config, init_method=torch.nn.init.normal_, input_is_parallel=True, **fields
        )
    generator = torch.Generator().manual_seed(3 + dist.get_rank())
    for parameter in made.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return made


def passes(layer, x, frozen=False):
    """Everything a pass gives."""
    layer.weight.requires_grad_(not frozen)
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out, bias = layer(x)
    out.float().square().sum().backward()
    gradients = [each.grad for each in layer.parameters()]
    return [out, bias, x.grad, *gradients]


def same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None) and (one is None or torch.equal(one, other))
