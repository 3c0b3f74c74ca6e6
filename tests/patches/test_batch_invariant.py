"""`--batch-invariant` in a small GPT: a sequence's logits and losses have the same bits in every batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mindspeed_lite
from mindspeed_lite.ops import batch_invariant
from tests.harness.process_groups import start
from tests.harness.processes import forked

VOCABULARY = 96
BIASED = {"gated_linear_unit": False, "activation_func": F.gelu, "add_bias_linear": True, "normalization": "LayerNorm"}
EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_router_load_balancing_type": "none", "moe_ffn_hidden_size": 44,
    "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip
KINDS = {"dense": {}, "biased": BIASED, "experts": EXPERTS}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
# Features that replace every operator of a dense and of an expert model.
FUSED = (
    "use_flash_attn", "use_fused_swiglu", "use_fused_rotary_pos_emb", "bias_dropout_fusion", "use_fused_cross_entropy",
)  # fmt: skip
FUSED_EXPERTS = ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion")


def model_of(dtype=torch.float32, **fields):
    """Widths are no multiples of a vector's."""
    if not torch.distributed.is_initialized():
        start()
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    model_parallel_cuda_manual_seed(1)
    torch.set_num_threads(2)
    values = {
        "num_layers": 2, "hidden_size": 40, "ffn_hidden_size": 92, "num_attention_heads": 4, "init_method_std": 0.2,
        "normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "bf16": dtype == torch.bfloat16, "params_dtype": dtype,
        **fields,
    }  # fmt: skip
    config = TransformerConfig(**values)
    spec = get_gpt_layer_local_spec(
        config.num_moe_experts, bool(fields.get("moe_grouped_gemm")), normalization=config.normalization
    )
    model = GPTModel(config, spec, VOCABULARY, 32, position_embedding_type="rope")
    return model.to(dtype)


def dependent(model, length, labels=False):
    """(batch size, place) where the first sequence has other bits than alone."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCABULARY, (8, length), generator=generator)

    def run(rows):
        chosen = tokens[rows]
        return model(chosen, torch.arange(length).repeat(len(rows), 1), None, labels=chosen if labels else None)

    found, alone = [], run(torch.tensor([0]))[0]
    for size in (1, 3, 8):
        rows = torch.randint(1, 8, (size,), generator=generator)
        places = (0, size // 2, size - 1)
        rows[[*places]] = 0
        got = run(rows)
        found += [(size, place) for place in places if not torch.equal(got[place], alone)]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@EVERY_KIND
@forked("megatron")
def test_a_sequence_has_the_bits_that_it_has_alone(kind, dtype):
    fields = KINDS[kind]
    norm = "use_fused_layernorm" if kind == "biased" else "use_fused_rmsnorm"
    names = (norm, *FUSED, *(FUSED_EXPERTS if kind == "experts" else ()))
    for flags, more in ({}, {}), (dict.fromkeys(names, True), {"moe_grouped_gemm": True} if kind == "experts" else {}):
        with mindspeed_lite.enabled(**flags), mindspeed_lite.enabled(batch_invariant=True):
            model = model_of(dtype, **fields, **more)
            assert not dependent(model, 1)
            assert not dependent(model, 3, labels=True)


@EVERY_KIND
@forked("megatron")
def test_without_it_the_bits_differ(kind):
    model = model_of(**KINDS[kind])
    assert dependent(model, 1)
    with mindspeed_lite.enabled(batch_invariant=True):
        assert not dependent(model, 1)
    assert dependent(model, 1), "the undo left something"


@forked("megatron")
def test_recomputed_layers_have_the_bits_of_the_forward_pass():
    tokens = torch.arange(3)[None]

    def gradients(**fields):
        model = model_of(**fields)
        model(tokens, torch.arange(3)[None], None, labels=tokens).sum().backward()
        return [each.grad for each in model.parameters()]

    with mindspeed_lite.enabled(batch_invariant=True):
        whole = gradients()
        recomputed = gradients(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert all(torch.equal(one, other) for one, other in zip(whole, recomputed, strict=True))


@forked("megatron")
def test_recomputed_functions_have_the_bits_of_the_forward_pass():
    start()
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    weight, seen = torch.randn(96, 100, requires_grad=True), []

    def multiply(x):
        y = x @ weight
        seen.append(y.detach().clone())
        return y

    with mindspeed_lite.enabled(batch_invariant=True):
        checkpoint = CheckpointWithoutOutput()
        with batch_invariant.scope():
            y = checkpoint.checkpoint(multiply, torch.randn(1, 96, requires_grad=True))
            z = y.exp()
        checkpoint.discard_output_and_register_recompute(z)
        z.sum().backward()
    one, other = seen
    assert torch.equal(one, other)


@forked("megatron")
def test_a_compiled_model_runs_uncompiled():
    with mindspeed_lite.enabled(batch_invariant=True):
        model = model_of()
        assert not dependent(torch.compile(model), 1)
