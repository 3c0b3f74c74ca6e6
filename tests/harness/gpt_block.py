"""A small GPT in real Megatron, and what its layers keep for the backward pass."""

from __future__ import annotations

import contextlib

import torch

from tests.harness.process_groups import start

SEQUENCE, BATCH, HIDDEN, FFN, LAYERS = 24, 2, 32, 80, 3


def model_of(transformer_engine=False, **fields):
    if not torch.distributed.is_initialized():
        start()
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlock

    model_parallel_cuda_manual_seed(1)
    values = {
        "num_layers": LAYERS, "hidden_size": HIDDEN, "ffn_hidden_size": FFN, "num_attention_heads": 4,
        "normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False, "hidden_dropout": 0.0, "attention_dropout": 0.0, "bf16": True,
        "params_dtype": torch.bfloat16, "bias_activation_fusion": True, **fields,
    }  # fmt: skip
    config = TransformerConfig(**values)
    if transformer_engine:
        make, more = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec, {"moe_grouped_gemm": True}
    else:
        make, more = gpt_layer_specs.get_gpt_layer_local_spec, {"normalization": "RMSNorm"}
    spec = make(num_experts=config.num_moe_experts, **more)
    return TransformerBlock(config=config, spec=spec, post_layer_norm=False).bfloat16()


@contextlib.contextmanager
def keeping():
    """Collects the storages that are kept for the backward pass inside, by their address."""
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def size_without(kept, others):
    apart = {each.untyped_storage()._cdata for each in others}
    return sum(storage.nbytes() for key, storage in kept.items() if key not in apart)


def step(model):
    """(bytes kept beside the weights, output and gradients) of one forward and backward pass."""
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
    for parameter in model.parameters():
        parameter.grad = None
    with keeping() as kept:
        out = model(x, attention_mask=None)
        out = out[0] if isinstance(out, tuple) else out
    size = size_without(kept, model.parameters())
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).bfloat16())
    return size, [out.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def same(one, other):
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
