"""Parameter counts, against Megatron's own models on every stage of layouts of up to sixteen ranks."""

from __future__ import annotations

import shlex
import subprocess
from typing import Any

import pytest
import torch

from mindspeed_lite import platform
from mindspeed_lite.planner import estimate, layers, layout, parameters, read
from tests.harness import traces
from tests.harness.checkouts import ROOT
from tests.harness.processes import forked

SMALL = (
    "--num-layers 8 --hidden-size 48 --ffn-hidden-size 80 --num-attention-heads 8 --seq-length 16 --vocab-size 500 "
    "--tokenizer-type NullTokenizer --micro-batch-size 1 --max-position-embeddings 24 "
)
GPT2 = ""
LLAMA = (
    "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --group-query-attention "
    "--num-query-groups 4 --untie-embeddings-and-output-weights --kv-channels 8 --qk-layernorm "
)
EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 40 --moe-layer-freq ([0]*1+[1]*3)*2"
MOE = f"{EXPERTS} --moe-shared-expert-intermediate-size 32"
TRAININGS = {
    "tied": (1, GPT2),
    "tied over two stages": (2, f"{GPT2} --pipeline-model-parallel-size 2"),
    "biases of qkv alone": (1, f"{GPT2} --disable-bias-linear --add-qkv-bias --qk-layernorm"),
    "tensor parallel": (4, f"{LLAMA} --tensor-model-parallel-size 4"),
    "more stages": (8, f"{LLAMA} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4"),
    "uneven stages": (
        4,
        f"{LLAMA} --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1 "
        "--decoder-last-pipeline-num-layers 3",
    ),
    "embedding and loss count as layers": (
        2,
        f"{LLAMA} --num-layers 10 --pipeline-model-parallel-size 2 --account-for-embedding-in-pipeline-split "
        "--num-virtual-stages-per-pipeline-rank 3 --account-for-loss-in-pipeline-split",
    ),
    "interleaved": (
        4,
        f"{LLAMA} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--num-virtual-stages-per-pipeline-rank 2",
    ),
    "experts": (4, f"{LLAMA} {MOE} --expert-model-parallel-size 4"),
    "experts with biases": (
        4,
        f"{EXPERTS} --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 "
        "--sequence-parallel --no-bias-gelu-fusion",
    ),
    "experts in every layout": (
        16,
        f"{LLAMA} {MOE} --expert-model-parallel-size 4 --tensor-model-parallel-size 2 --sequence-parallel "
        "--pipeline-model-parallel-size 2",
    ),
    "whole experts": (
        8,
        f"{LLAMA} {MOE} --expert-model-parallel-size 4 --tensor-model-parallel-size 2 --sequence-parallel "
        "--expert-tensor-parallel-size 1",
    ),
}


def build(training: Any, rank: int, stage: int) -> tuple[int, int]:
    """What Megatron builds on a rank that only imagines the others: parameters in all, and those of experts."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=training.world_size)
    chunks = training.vpp if training.vpp > 1 else None
    parallel_state.initialize_model_parallel(
        training.tp, training.pp, chunks, expert_model_parallel_size=training.expert_model_parallel_size,
        expert_tensor_parallel_size=training.etp, create_gloo_process_groups=False,
    )  # fmt: skip
    model_parallel_cuda_manual_seed(1)
    experts: dict[str, Any] = {}
    if training.num_experts:
        experts = {
            "num_moe_experts": training.num_experts,
            "moe_ffn_hidden_size": training.moe_ffn_hidden_size,
            "moe_layer_freq": [int(training.is_moe(layer)) for layer in range(training.num_layers)],
            "moe_shared_expert_intermediate_size": training.moe_shared_expert_intermediate_size or None,
        }
    config = TransformerConfig(
        num_layers=training.num_layers, hidden_size=training.hidden_size, ffn_hidden_size=training.ffn_hidden_size,
        num_attention_heads=training.num_attention_heads, num_query_groups=training.groups,
        kv_channels=training.kv_channels, normalization=training.normalization, qk_layernorm=training.qk_layernorm,
        add_bias_linear=training.add_bias_linear, add_qkv_bias=training.add_qkv_bias,
        gated_linear_unit=training.swiglu,
        activation_func=torch.nn.functional.silu if training.swiglu else torch.nn.functional.gelu,
        tensor_model_parallel_size=training.tp, pipeline_model_parallel_size=training.pp,
        virtual_pipeline_model_parallel_size=chunks, sequence_parallel=training.sequence_parallel,
        expert_model_parallel_size=training.expert_model_parallel_size, expert_tensor_parallel_size=training.etp,
        num_layers_in_first_pipeline_stage=training.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=training.decoder_last_pipeline_num_layers,
        account_for_embedding_in_pipeline_split=training.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=training.account_for_loss_in_pipeline_split,
        pipeline_dtype=torch.float32, perform_initialization=False, use_cpu_initialization=True,
        bias_activation_fusion=False, **experts,
    )  # fmt: skip
    counts = [0, 0]
    for chunk in range(training.vpp):
        where = chunk if chunks else None
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_decoder_block_spec(
                config, use_transformer_engine=False, normalization=training.normalization, vp_stage=where
            ),
            vocab_size=training.padded_vocab_size,
            max_sequence_length=training.max_position_embeddings,
            pre_process=stage == 0 and chunk == 0,
            post_process=stage == training.pp - 1 and chunk == training.vpp - 1,
            share_embeddings_and_output_weights=not training.untie_embeddings_and_output_weights,
            position_embedding_type=training.position_embedding_type,
            vp_stage=where,
        )
        for parameter in model.parameters():
            counts[0] += parameter.numel()
            counts[1] += parameter.numel() * (not getattr(parameter, "allreduce", True))
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    return counts[0], counts[1]


@forked("megatron")
def test_they_are_those_of_megatron() -> None:
    platform.activate()
    traces.load()
    wrong = {}
    for name, (world_size, words) in TRAININGS.items():
        training = read((SMALL + words).split(), world_size)
        for stage in sorted({0, training.pp - 1}):
            chunks = layers.stages(training)[stage]
            held = estimate.parameters_of(training, chunks)
            built = build(training, stage * world_size // training.pp, stage)
            if (held.total, held.experts) != built:
                wrong[name, stage] = (held, built)
    assert not wrong


@pytest.mark.parametrize("name", TRAININGS)
def test_products_have_nearly_all_of_them_and_never_more(name: str) -> None:
    world_size, words = TRAININGS[name]
    training = read((SMALL + words).split(), world_size)
    for chunks in layers.stages(training):
        held, least = estimate.parameters_of(training, chunks), parameters.of_stage(training, chunks)
        assert 0.9 * held.total < least.total <= held.total and 0.9 * held.experts <= least.experts <= held.experts


def test_every_layer_stands_on_one_stage() -> None:
    for world_size, words in TRAININGS.values():
        training = read((SMALL + words).split(), world_size)
        numbers = sorted(number for stage in layers.stages(training) for chunk in stage for number in chunk.layers)
        assert numbers == list(range(training.num_layers))


@forked("megatron")
def test_layouts_by_hand_are_read_as_megatron_reads_them() -> None:
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    names = {"E": LayerType.embedding, "t": LayerType.decoder, "m": LayerType.mtp, "L": LayerType.loss}
    for text, pp in (("Et*3|(tt|)*29,m|L", 16), ("E|(t|)*2,tt|L", 5), ("E,t*4,(m)*2L", 1), ("Ettt|tL", 2)):
        found = [[names[letter] for letter in part] for part in layout.parts(text)]
        by_stage = PipelineParallelLayerLayout(text, pp).layout
        chunks = len(by_stage[0])
        assert found == [by_stage[stage][chunk] for chunk in range(chunks) for stage in range(pp)]


def test_deepseek_v3_has_as_many_as_were_published() -> None:
    printed = subprocess.run(
        ["bash", str(ROOT / "examples" / "deepseek_v3.sh"), "--print"], capture_output=True, text=True, check=True
    )
    training = read(shlex.split(printed.stdout), 1024)
    model, further = [0.0, 0.0], [0.0, 0.0]
    for chunk in (chunk for stage in layers.stages(training) for chunk in stage):
        held = parameters.of_stage(training, [chunk])
        found = further if chunk.further else model
        found[0] += held.dense
        found[1] += held.experts
    # Norms and routers are not split by tensor parallelism, which is a hundredth of a percent.
    total = model[0] * training.tp + model[1] * training.ep * training.etp
    assert abs(total / 671.03e9 - 1) < 2e-4, "DeepSeek-V3 Technical Report: 671B"
    own = further[0] * training.tp + further[1] * training.ep * training.etp
    # The same: 14B more, with the embedding; the output head is shared here.
    assert 12e9 < own < 14e9
