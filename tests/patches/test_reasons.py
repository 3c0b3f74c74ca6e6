"""Why each feature does not apply: its condition, its conflicting arguments, refused flags, and `auto`.

A row changes the training of `BASE` in which the feature applies. A new feature has its rows here or in its own test,
which also has what takes more than a row.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mindspeed_lite import runtime
from mindspeed_lite.engine import Context, OptionError, Settings, automatic_reasons
from mindspeed_lite.memory import host
from mindspeed_lite.patches import moe_alltoall_mc2
from mindspeed_lite.platform import megatron
from tests.harness.swapped import reasons

EXPERTS = {"num_experts": 16, "expert_model_parallel_size": 8, "moe_token_dispatcher_type": "alltoall"}
PIPELINE = {"pipeline_model_parallel_size": 2, "transformer_impl": "local"}
# Feature -> (settings besides its own flag, arguments, device) with which it applies.
BASE = {
    "adaptive_memory": ({"memory_budget": 1.0}, {}, "cpu"),
    "balance_sequence_lengths": (
        {},
        {"dataloader_inter_document_masking": True, "data_parallel_size": 2}
        | {"global_batch_size": 16, "micro_batch_size": 2},
        "cpu",
    ),
    "balanced_moe_experts": ({}, EXPERTS, "cpu"),
    "batch_invariant": ({}, {}, "cpu"),
    "bias_dropout_fusion": ({}, {}, "cpu"),
    "delay_wgrad_compute": (
        {"use_gradient_accumulation_fusion": True},
        {"overlap_moe_expert_parallel_comm": True},
        "cpu",
    ),
    "enable_expert_placement": ({}, {**EXPERTS, "expert_model_parallel_size": 4}, "cpu"),
    "enable_recompute_layers_per_pp_rank": ({}, {"recompute_method": "block"}, "cpu"),
    "grad_reduce_compression": ({"grad_reduce_compression": "int8"}, {"data_parallel_size": 2}, "cpu"),
    "gradient_accumulation_fusion": ({}, {}, "cpu"),
    "masked_softmax_fusion": ({}, {}, "cpu"),
    "moe_allgather_overlap_comm": ({}, {**EXPERTS, "moe_token_dispatcher_type": "allgather"}, "cpu"),
    "moe_alltoall_mc2": ({}, EXPERTS, "npu"),
    "moe_alltoall_overlap_comm": ({}, EXPERTS, "cpu"),
    "moe_fb_overlap": ({}, {**EXPERTS, "bf16": True}, "cpu"),
    "moe_grouped_gemm": ({}, EXPERTS, "cpu"),
    "moe_hierarchical_alltoallv": ({"moe_node_size": 4}, EXPERTS, "cpu"),
    "moe_permute_fusion": ({}, EXPERTS, "cpu"),
    "moe_record_load": ({}, EXPERTS, "cpu"),
    "moe_router_fusion": ({}, EXPERTS, "cpu"),
    "moe_tp_extend_ep": ({}, {**EXPERTS, "tensor_model_parallel_size": 2}, "cpu"),
    "moe_wgrad_side_stream": ({"moe_wgrad_side_stream": "auto"}, EXPERTS, "cuda"),
    "moe_zero_memory": ({"moe_zero_memory": "level0"}, EXPERTS, "cpu"),
    "optimize_send_recv_comm": ({}, PIPELINE, "cpu"),
    "param_gather_once": ({}, {**EXPERTS, "use_distributed_optimizer": True}, "cpu"),
    "pipeline_schedule": (
        {"pipeline_schedule": "1f1b", "use_gradient_accumulation_fusion": True},
        PIPELINE,
        "cpu",
    ),
    "quant_states": ({"quant_states": "bf16"}, {}, "cpu"),
    "recompute_activation_function": ({}, {}, "cpu"),
    "recompute_in_bubble": ({}, PIPELINE, "cpu"),
    "recompute_norm": ({}, {}, "cpu"),
    "reset_bucket_group_order": ({}, {"overlap_param_gather": True}, "cpu"),
    "reuse_fp32_param": ({}, {"bf16": True}, "cpu"),
    "schedules_method": (
        {"schedules_method": "dualpipev"},
        {**PIPELINE, "num_layers": 8, "untie_embeddings_and_output_weights": True},
        "cpu",
    ),
    "swap_attention": ({}, {}, "cuda"),
    "swap_optimizer": ({}, {}, "cuda"),
    "use_ascend_coc": ({}, {"tensor_model_parallel_size": 2}, "cpu"),
    "use_ascend_mc2": ({}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, "npu"),
    "use_flash_attn": ({}, {}, "cpu"),
    "use_fused_adamw": ({}, {}, "cpu"),
    "use_fused_cross_entropy": ({}, {}, "cpu"),
    "use_fused_embedding": ({}, {}, "cpu"),
    "use_fused_l2norm": ({}, {"qk_l2_norm": True}, "cpu"),
    "use_fused_layernorm": ({}, {}, "cpu"),
    "use_fused_linear_cross_entropy": ({}, {}, "cpu"),
    "use_fused_linear_log_prob": ({}, {"perform_rl_step": True}, "cpu"),
    "use_fused_rmsnorm": ({}, {}, "cpu"),
    "use_fused_rotary_pos_emb": ({}, {}, "cpu"),
    "use_fused_swiglu": ({}, {"swiglu": True}, "cpu"),
    "virtual_optimizer": ({"virtual_optimizer": ("all",)}, {}, "cpu"),
}
OPTIONS = [*runtime.catalogue().options()]
TE = {"transformer_impl": "transformer_engine"}


def context(feature, args=(), settings=(), device=None, explicit=()):
    own, host_args, usual = BASE[feature.name]
    switch = {feature.options[0].dest: True} if feature.options[0].is_switch else {}
    given = Settings.of(OPTIONS, {**switch, **own, **dict(settings)})
    return Context(given, device or usual, {}, {**host_args, **dict(args)}, frozenset(explicit))


# Reasons by feature: (arguments, text) or (arguments, text, more of the context).
REASONS = {
    "balance_sequence_lengths": [
        ({"moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"]}, "global_aux_loss depends on which"),
        ({"dataloader_inter_document_masking": False}, "--dataloader-inter-document-masking"),
        ({"dataloader_type": "cyclic"}, "--dataloader-type cyclic"),
        ({"data_parallel_size": 1}, "one data-parallel rank"),
        ({"micro_batch_size": 8}, "one micro-batch in a step"),
    ],
    "balanced_moe_experts": [
        ({"num_experts": None}, "--num-experts"),
        ({"expert_model_parallel_size": 1}, "--expert-model-parallel-size 1"),
        ({"moe_token_dispatcher_type": "flex"}, "--moe-token-dispatcher-type flex"),
        ({**TE, "moe_grouped_gemm": True}, "--moe-grouped-gemm"),
    ],
    "batch_invariant": [
        ({"hidden_dropout": 0.1}, "--hidden-dropout draws by a row's place"),
        ({"attention_dropout": 0.1}, "--attention-dropout"),
        ({"moe_input_jitter_eps": 0.1}, "--moe-input-jitter-eps"),
        ({"moe_expert_capacity_factor": 1.0}, "--moe-expert-capacity-factor drops a token"),
        ({"fp8": "hybrid"}, "--fp8-format"),
        ({"fp4": "nvfp4"}, "--fp4-format"),
        ({"overlap_moe_expert_parallel_comm": True}, "--overlap-moe-expert-parallel-comm"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl"),
        (TE, "--transformer-impl transformer_engine"),
        ({"tensor_model_parallel_size": 4}, "more than 2 tensor-parallel ranks"),
        ({"context_parallel_size": 2}, "--context-parallel-size"),
        ({"moe_token_dispatcher_type": "allgather", "expert_model_parallel_size": 2}, "allgather adds"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn"),
        ({"batch_invariant_mode": True}, "--batch-invariant-mode needs CUDA"),
        ({}, "--batch-invariant-mode is not given", {"device": "cuda"}),
        ({}, "NPU: CANN", {"device": "npu"}),
    ],
    "bias_dropout_fusion": [
        ({}, "torch.compile", {"device": "cuda"}),
        ({"bias_dropout_fusion": False}, "--no-bias-dropout-fusion", {"explicit": ["bias_dropout_fusion"]}),
        ({"language_model": SimpleNamespace(bias_dropout_fusion=False)}, "YAML"),
    ],
    "delay_wgrad_compute": [
        ({}, "--gradient-accumulation-fusion is off", {"settings": {"use_gradient_accumulation_fusion": False}}),
        ({"overlap_moe_expert_parallel_comm": False}, "--overlap-moe-expert-parallel-comm"),
        (TE, "--transformer-impl"),
    ],
    "enable_expert_placement": [
        ({"num_experts": None}, "--num-experts"),
        ({"expert_model_parallel_size": 1}, "--expert-model-parallel-size 1"),
        ({"expert_model_parallel_size": 16}, "one expert"),
        ({"moe_token_dispatcher_type": "flex"}, "--moe-token-dispatcher-type flex"),
        ({**TE, "moe_grouped_gemm": True}, "--moe-grouped-gemm"),
        ({"optimizer": "muon"}, "--optimizer muon"),
        ({"ckpt_format": "torch"}, "--ckpt-format torch"),
    ],
    "enable_recompute_layers_per_pp_rank": [({"recompute_method": "uniform"}, "--recompute-method block")],
    "grad_reduce_compression": [
        ({"data_parallel_size": 1}, "no gradients are reduced"),
        ({"num_distributed_optimizer_instances": 2}, "--num-distributed-optimizer-instances"),
        ({"reduce_scatter_with_fp32_accumulation": True}, "--reduce-scatter-with-fp32-accumulation"),
        ({}, "LOCAL_WORLD_SIZE", {"settings": {"grad_reduce_compression_scope": "between-nodes"}}),
    ],
    "gradient_accumulation_fusion": [
        (
            {"gradient_accumulation_fusion": False},
            "--no-gradient-accumulation-fusion",
            {"explicit": ["gradient_accumulation_fusion"]},
        ),
        ({"model_parallel": SimpleNamespace(gradient_accumulation_fusion=False)}, "YAML"),
    ],
    "masked_softmax_fusion": [
        ({"seq_length": 48}, "--seq-length 48", {"device": "npu"}),
        ({"seq_length": 8192}, "--seq-length 8192", {"device": "npu"}),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl", {"device": "npu"}),
        ({}, "--use-flash-attn", {"device": "cuda"}),
        ({"masked_softmax_fusion": False}, "--no-masked-softmax-fusion", {"explicit": ["masked_softmax_fusion"]}),
        ({"language_model": SimpleNamespace(masked_softmax_fusion=False)}, "YAML"),
    ],
    "moe_allgather_overlap_comm": [
        ({"num_experts": None}, "--num-experts"),
        ({"expert_model_parallel_size": 1}, "--expert-model-parallel-size"),
        (
            {"expert_model_parallel_size": 1, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
            "tokens stay where they are",
        ),
        ({"moe_token_dispatcher_type": "alltoall"}, "--moe-token-dispatcher-type alltoall"),
    ],
    "moe_alltoall_mc2": [
        ({}, "the device is cpu", {"device": "cpu"}),
        ({"num_experts": None}, "--num-experts"),
        ({"expert_model_parallel_size": 1}, "--expert-model-parallel-size 1"),
        ({"moe_token_dispatcher_type": "flex"}, "--moe-token-dispatcher-type flex"),
        ({"tensor_model_parallel_size": 2}, "--expert-tensor-parallel-size 1"),
    ],
    "moe_alltoall_overlap_comm": [
        ({"num_experts": None}, "--num-experts"),
        ({"expert_model_parallel_size": 1}, "--expert-model-parallel-size 1"),
        ({"moe_token_dispatcher_type": "allgather"}, "--moe-token-dispatcher-type allgather"),
        (
            {"moe_shared_expert_intermediate_size": 8, "recompute_modules": ["shared_experts"]},
            "--recompute-modules shared_experts",
        ),
    ],
    "moe_fb_overlap": [
        ({"num_experts": None}, "--num-experts"),
        ({"expert_model_parallel_size": 1}, "--expert-model-parallel-size 1"),
        ({"moe_token_dispatcher_type": "allgather"}, "--moe-token-dispatcher-type allgather"),
        ({"pipeline_model_parallel_size": 2}, "--num-virtual-stages-per-pipeline-rank 2"),
        ({"recompute_granularity": "full"}, "--recompute-granularity full"),
        ({"recompute_modules": ["moe"]}, "--recompute-modules moe"),
        ({"bf16": False}, "--bf16"),
        ({"moe_shared_expert_overlap": True}, "give only one"),
        ({"mtp_num_layers": 2}, "--mtp-num-layers"),
    ],
    "moe_grouped_gemm": [({"num_experts": None}, "--num-experts"), (TE, "has its own grouped experts, with this flag")],
    "moe_hierarchical_alltoallv": [
        ({"num_experts": None}, "--num-experts"),
        ({"expert_model_parallel_size": 1}, "--expert-model-parallel-size 1"),
        ({"moe_token_dispatcher_type": "flex"}, "--moe-token-dispatcher-type flex"),
        ({}, "the 8 x 1 ranks that share experts are on one node of 8", {"settings": {"moe_node_size": 8}}),
        (
            {"tensor_model_parallel_size": 2},
            "the 8 x 2 ranks that share experts are on one node of 16",
            {"settings": {"moe_node_size": 16}},
        ),
        ({}, "cannot be divided among nodes of 3", {"settings": {"moe_node_size": 3}}),
        ({}, "cannot be divided among nodes of 12", {"settings": {"moe_node_size": 12}}),
    ],
    "moe_permute_fusion": [({"num_experts": None}, "--num-experts"), (TE, "has its own permutation, with this flag")],
    "moe_record_load": [({"num_experts": None}, "--num-experts")],
    "moe_router_fusion": [({"num_experts": None}, "--num-experts"), (TE, "has its own fused router, with this flag")],
    "moe_tp_extend_ep": [
        ({"num_experts": 24}, "16 ranks"),
        ({"tensor_model_parallel_size": 1}, "--tensor-model-parallel-size 1"),
        ({"num_experts": None}, "--num-experts"),
        (
            {"expert_tensor_parallel_size": 2},
            "--expert-tensor-parallel-size 2",
            {"explicit": ["expert_tensor_parallel_size"]},
        ),
    ],
    "moe_wgrad_side_stream": [({}, "streams", {"device": "cpu"}), (TE, "--moe-grouped-gemm is not given")],
    "moe_zero_memory": [
        ({"num_experts": None}, "--num-experts"),
        (TE, "--moe-grouped-gemm is not given"),
        ({"moe_token_dispatcher_type": "allgather"}, "--moe-token-dispatcher-type allgather"),
        ({"recompute_granularity": "full"}, "computes every layer again as a whole"),
        ({"recompute_granularity": "selective", "recompute_modules": ["moe"]}, "--recompute-modules moe"),
        ({"moe_apply_probs_on_input": True}, "--moe-apply-probs-on-input"),
    ],
    "optimize_send_recv_comm": [({"pipeline_model_parallel_size": 1}, "size 1: no messages")],
    "param_gather_once": [
        ({"use_distributed_optimizer": False}, "--use-distributed-optimizer"),
        ({"num_experts": None}, "--num-experts"),
    ],
    "pipeline_schedule": [
        ({"pipeline_model_parallel_size": 1}, "--pipeline-model-parallel-size 1"),
        ({"overlap_moe_expert_parallel_comm": True}, "a schedule of its own"),
        (
            {},
            "--gradient-accumulation-fusion is off",
            {"settings": {"pipeline_schedule": "zb-h1", "use_gradient_accumulation_fusion": False}},
        ),
        (
            {**TE, "tp_comm_overlap": True},
            "--tp-comm-overlap: Transformer Engine delays no weight gradients",
            {"settings": {"pipeline_schedule": "zb-auto", "use_gradient_accumulation_fusion": True}},
        ),
    ],
    "recompute_activation_function": [({"recompute_granularity": "full"}, "computes every layer again as a whole")],
    "recompute_in_bubble": [
        ({"pipeline_model_parallel_size": 1}, "no bubble"),
        (
            {},
            "add --recompute-granularity full",
            {"settings": {"recompute_in_bubble": False, "recompute_in_advance": True}},
        ),
    ],
    "recompute_norm": [
        ({"recompute_granularity": "full"}, "computes every layer again as a whole"),
        ({**TE, "num_experts": None}, "within linear layers"),
    ],
    "reset_bucket_group_order": [({"overlap_param_gather": False}, "no gather overlaps")],
    "reuse_fp32_param": [
        ({"bf16": False}, "--bf16 is not given"),
    ],
    "schedules_method": [
        ({"pipeline_model_parallel_size": 1}, "--pipeline-model-parallel-size 1"),
        ({"num_layers": 6}, "a multiple of 4"),
        ({"untie_embeddings_and_output_weights": False}, "add --untie-embeddings"),
        ({"virtual_pipeline_model_parallel_size": 3}, "not 3"),
    ],
    "swap_attention": [
        ({}, "cpu has one memory", {"device": "cpu"}),
        ({"recompute_granularity": "full"}, "keeps nothing within a layer"),
    ],
    "swap_optimizer": [
        ({}, "--virtual-optimizer", {"device": "cpu"}),
    ],
    "use_ascend_coc": [
        ({"tensor_model_parallel_size": 1}, "nothing travels"),
        (TE, "overlaps by itself"),
        ({}, "asks for Megatron's own", {"settings": {"coc_mode": 0}}),
    ],
    "use_ascend_mc2": [
        ({}, "the device is cuda: --use-ascend-coc", {"device": "cuda"}),
        ({"sequence_parallel": False}, "nothing is gathered or scattered"),
        ({"tensor_model_parallel_size": 1}, "nothing travels"),
        (TE, "its own layers"),
    ],
    "use_flash_attn": [
        (TE, "--transformer-impl transformer_engine"),
        ({}, "asks for Megatron's own", {"settings": {"use_flash_attn": False, "attention_backend": "unfused"}}),
    ],
    "use_fused_adamw": [
        ({"optimizer": "muon"}, "--optimizer muon"),
    ],
    "use_fused_cross_entropy": [
        ({"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}, "--cross-entropy-fusion-impl te")
    ],
    "use_fused_embedding": [
        ({"tensor_model_parallel_size": 1}, "npu has no gradient in rows", {"device": "npu"}),
        ({"tensor_model_parallel_size": 1, "use_megatron_fsdp": True}, "--use-megatron-fsdp"),
    ],
    "use_fused_l2norm": [({"qk_l2_norm": False}, "--qk-l2-norm is not given")],
    "use_fused_layernorm": [
        (TE, "--transformer-impl transformer_engine"),
        ({"normalization": "RMSNorm"}, "--normalization RMSNorm"),
    ],
    "use_fused_linear_cross_entropy": [
        ({"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}, "Transformer Engine")
    ],
    "use_fused_linear_log_prob": [({"perform_rl_step": False}, "--perform-rl-step is not given")],
    "use_fused_rmsnorm": [
        (TE, "--transformer-impl transformer_engine"),
        ({"normalization": "LayerNorm"}, "--normalization LayerNorm"),
    ],
    "use_fused_rotary_pos_emb": [
        (TE, "--transformer-impl transformer_engine"),
        ({"position_embedding_type": "learned_absolute"}, "--position-embedding-type learned_absolute"),
    ],
    "use_fused_swiglu": [
        ({"swiglu": False, "add_bias_linear": False}, "GELU without bias"),
        ({"swiglu": False, "add_bias_linear": True, "bias_gelu_fusion": False}, "--no-bias-gelu-fusion"),
        ({"swiglu": False, "quick_geglu": True, "bias_gelu_fusion": False}, "--quick-geglu"),
    ],
}
# Values that are refused by feature: (settings, arguments, text of the one line).
REFUSED = {
    "adaptive_memory": [({"memory_budget": None}, {}, "add --memory-budget GIB")],
    "moe_zero_memory": [
        ({"moe_zero_memory": None, "moe_zero_memory_num_layers": 2}, {}, "add --moe-zero-memory"),
        ({"moe_zero_memory": "disable", "moe_zero_memory_num_layers": 2}, {}, "add --moe-zero-memory"),
    ],
    "pipeline_schedule": [
        ({"pipeline_schedule": None, "pipeline_schedule_trace": "folder"}, {}, "name it with --pipeline-schedule"),
        ({"pipeline_schedule_max_live": 3}, {}, "bounds zb-auto and --recompute-in-bubble, not 1f1b"),
        ({"pipeline_schedule": "interleaved"}, {}, "add --num-virtual-stages"),
    ],
    "recompute_in_bubble": [
        ({"recompute_in_advance": True}, {}, "leave one out"),
        ({"pipeline_schedule": "zb-h1"}, {}, "zb-h1 fills the bubble"),
    ],
    "schedules_method": [
        ({"pipeline_schedule": "1f1b"}, {}, "leave one out"),
    ],
    "swap_attention": [
        ({"swap_modules": " , "}, {}, "wants names of a layer's modules"),
    ],
    "use_ascend_coc": [
        ({"tp_comm_overlap": True}, {"tp_comm_overlap_cfg": "buffers.yaml"}, "Leave it out; --coc-parallel-num says"),
        ({"coc_fused_kernel": True}, {}, "uses symmetric memory, which is CUDA's, and the device is cpu"),
    ],
    "use_flash_attn": [({"attention_backend": "unfused"}, {}, "contradict each other")],
    "virtual_optimizer": [
        (
            {"virtual_optimizer": (1.0, 2.0)},
            {"pipeline_model_parallel_size": 3},
            "one budget or one for each of 3 pipeline stages, not 2: give 3",
        ),
    ],
}
# Arguments of Megatron that a feature sets: (settings, arguments, what it sets).
ARGUMENTS = {
    "gradient_accumulation_fusion": [
        ({}, {}, {"gradient_accumulation_fusion": True}),
        ({}, {"language_model": SimpleNamespace()}, {}),
    ],
    "moe_fb_overlap": [({}, {}, {"overlap_moe_expert_parallel_comm": True})],
    "recompute_in_bubble": [
        ({}, {}, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
        ({"recompute_in_bubble": False, "recompute_in_advance": True}, {"recompute_granularity": "full"}, {}),
    ],
    "schedules_method": [
        ({}, {}, {"num_virtual_stages_per_pipeline_rank": 2}),
        ({}, {"num_layers_per_virtual_pipeline_stage": 2}, {}),
    ],
    "use_ascend_coc": [({}, {}, {}), ({"tp_comm_overlap": True}, {}, {"tp_comm_overlap": False})],
    "use_flash_attn": [
        ({}, {}, {"create_attention_mask_in_dataloader": False}),
        # Documents must not see each other.
        ({}, {"reset_attention_mask": True}, {}),
    ],
    "use_fused_rotary_pos_emb": [
        *(({}, {"multi_latent_attention": each}, {"apply_rope_fusion": True}) for each in (False, True)),
        ({}, {"position_embedding_type": "yarn"}, {}),
        ({}, {"rotary_interleaved": True}, {}),
        ({}, {"experimental_attention_variant": "dsa"}, {}),
        ({}, {"multi_latent_attention": True, "rope_type": "rope"}, {}),
        ({}, {"multi_latent_attention": True, "cache_mla_latents": True}, {}),
    ],
}
# Values that an option itself refuses.
BAD_VALUES = [
    *(("swap_optimizer_times", each, "--swap-optimizer-times") for each in ("few", "0x", 1.5)),
    *(("virtual_optimizer", [each], "--virtual-optimizer") for each in ("much", "-1", "inf")),
    ("quant_states", "int4", "--quant-states takes one of bf16, fp8, not 'int4'"),
    ("coc_mode", 7, "--coc-mode takes one of -1, 0, 1, 2, not 7"),
    *(("coc_parallel_num", each, "takes one of 1, 2, 4, 8, auto, not") for each in (3, "3", "many")),
    *(("context_parallel_algo", each, "--context-parallel-algo") for each in ("adaptive_cp_algo", "none_such")),
    ("pipeline_schedule_max_live", "x", "--pipeline-schedule-max-live"),
    *(
        (each.dest, value, f"{each.flag} takes a number of at least {each.least}, not {value}")
        for each in OPTIONS
        if each.least is not None
        for value in ([each.least - 1] if each.convert is int else [-0.5, float("inf"), float("nan")])
    ),
    ("pipeline_schedule", "zb-h3", "one of 1f1b, interleaved"),
    ("attention_backend", "swift", "--attention-backend takes"),
    ("moe_wgrad_side_stream", "sometimes", "takes one of auto, always"),
    ("moe_zero_memory", "level2", "takes one of disable, level0, level1"),
]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """The optional packages that features look for; a host memory that the device addresses."""
    find = importlib.util.find_spec
    found = {"scipy": object(), "torch_npu": object(), "apex": None, "transformer_engine": None}
    operators = dict.fromkeys(moe_alltoall_mc2._OPERATORS)
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(**operators))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: found[name] if name in found else find(name))
    monkeypatch.setattr(host, "why_not", lambda device: [])
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def rows(table):
    return [pytest.param(name, row, id=f"{name}-{number}") for name in table for number, row in enumerate(table[name])]


def test_rows_are_of_features():
    assert {*REASONS, *REFUSED, *ARGUMENTS} <= BASE.keys() <= {feature.name for feature in runtime.catalogue()}


@pytest.mark.parametrize("name", BASE)
def test_it_applies_here_and_auto_follows_its_declaration(name):
    feature = runtime.catalogue()[name]
    assert reasons(feature, context(feature)) == []
    left_off = automatic_reasons([feature], context(feature))[name]
    assert not feature.not_auto or [each for each in left_off if feature.not_auto in each]


@pytest.mark.parametrize(("name", "row"), rows(REASONS))
def test_a_reason_names_the_flag(name, row):
    feature = runtime.catalogue()[name]
    args, text, *more = row
    found = reasons(feature, context(feature, args, **(more[0] if more else {})))
    assert [each for each in found if text in each] == found[:1] or text in found[0], found


def test_auto_leaves_apexs_weight_gradients(monkeypatch):
    feature = runtime.catalogue()["gradient_accumulation_fusion"]
    asked = context(feature, device="cuda")
    unasked = replace(asked, settings=Settings({}))
    assert reasons(feature, unasked) == []
    find = importlib.util.find_spec
    kernel = SimpleNamespace(loader=object())
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: kernel if name.startswith("fused_weight") else find(name)
    )
    assert reasons(feature, asked) == [] and "Apex's kernel" in reasons(feature, unasked)[0]


def test_resumes_are_mended_wherever_the_optimizer_is_torchs_adam():
    """On CUDA too: Transformer Engine may be installed and not load. Other optimizers keep their own state."""
    feature = next(each for each in megatron.ASSUMPTIONS if each.name == "device_adam_state")
    fused = SimpleNamespace(optimizer=SimpleNamespace())
    first, second = (patch.make(lambda *given: given, None) for patch in feature.patches[:2])
    assert feature.condition is None and first(fused) == (fused,) and second(fused, {}) == (fused, {})


@pytest.mark.parametrize(
    ("device", "tokens", "text"),
    [("cpu", 4096, None), ("cpu", 65536, "65,536 tokens"), ("cuda", 4096, "in no fixed order")],
)
def test_auto_leaves_rows_of_the_embedding_off_where_they_do_not_pay_or_repeat(device, tokens, text):
    feature = runtime.catalogue()["use_fused_embedding"]
    sizes = {"micro_batch_size": 4, "seq_length": tokens // 4, "vocab_size": 32000, "tensor_model_parallel_size": 1}
    asked = context(feature, sizes, device=device)
    by_auto = replace(asked, settings=Settings({}))
    assert reasons(feature, asked) == []
    found = automatic_reasons([feature], by_auto)["use_fused_embedding"]
    assert found == [] if text is None else text in found[0]


def test_all_flags_of_cuda_graphs_are_refused_alike():
    flags = ("--cuda-graph-impl", "--enable-cuda-graph", "--external-cuda-graph")
    for feature in runtime.catalogue():
        found = {flag: feature.conflicting_args.get(flag[2:].replace("-", "_"), "") for flag in flags}
        whys = {why.removeprefix(f"{flag} ") for flag, why in found.items()}
        assert len(whys) == 1 and all(why.startswith(flag) for flag, why in found.items() if why), (feature.name, found)


@pytest.mark.parametrize("name", BASE)
def test_every_conflicting_argument_is_a_reason(name):
    feature = runtime.catalogue()[name]
    for argument, why in feature.conflicting_args.items():
        assert why in reasons(feature, context(feature, {argument: True})), argument


@pytest.mark.parametrize(("name", "row"), rows(REFUSED))
def test_flags_that_make_no_sense_are_refused_in_one_line(name, row):
    feature = runtime.catalogue()[name]
    settings, args, text = row
    given = context(feature, args, settings)
    assert feature.is_enabled(given.settings)
    with pytest.raises(OptionError) as error:
        reasons(feature, given)
    assert text in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "row"), rows(ARGUMENTS))
def test_arguments_that_a_feature_sets(name, row):
    feature = runtime.catalogue()[name]
    settings, args, wanted = row
    given = context(feature, args, settings)
    assert feature.arguments(given) == wanted
    if name != "use_ascend_coc":
        assert feature.arguments(replace(given, host_args=None)) == {}, "in Python there is nothing to set"


@pytest.mark.parametrize(("dest", "value", "text"), BAD_VALUES)
def test_values_that_an_option_does_not_take_are_refused_in_one_line(dest, value, text):
    with pytest.raises(OptionError) as error:
        Settings.of(OPTIONS, {dest: value})
    assert text in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        *((name, "use_fused_adamw") for name in ("quant_states", "reuse_fp32_param", "swap_optimizer")),
        ("virtual_optimizer", "use_fused_adamw"),
        ("recompute_in_bubble", "pipeline_schedule"),
        ("schedules_method", "pipeline_schedule"),
    ],
)
def test_a_feature_turns_on_the_one_that_it_needs(name, needed):
    features = runtime.catalogue()
    assert needed in {each.feature for each in features[name].requires}
    assert features[needed].is_enabled(context(features[name]).settings)
