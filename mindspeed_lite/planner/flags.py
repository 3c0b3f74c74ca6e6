"""Flags that affect memory, and unsupported ones.

Names are Megatron's `dest`; defaults are Megatron's.
"""

from __future__ import annotations

# Switches that set a name to True.
ON = {
    "--swiglu": "swiglu",
    "--squared-relu": "squared_relu",
    "--quick-geglu": "quick_geglu",
    "--add-qkv-bias": "add_qkv_bias",
    "--qk-layernorm": "qk_layernorm",
    "--multi-latent-attention": "multi_latent_attention",
    "--group-query-attention": "group_query_attention",
    "--untie-embeddings-and-output-weights": "untie_embeddings_and_output_weights",
    "--bf16": "bf16",
    "--fp16": "fp16",
    "--sequence-parallel": "sequence_parallel",
    "--use-distributed-optimizer": "use_distributed_optimizer",
    "--accumulate-allreduce-grads-in-fp32": "accumulate_allreduce_grads_in_fp32",
    "--grad-reduce-in-bf16": "grad_reduce_in_bf16",
    "--account-for-embedding-in-pipeline-split": "account_for_embedding_in_pipeline_split",
    "--account-for-loss-in-pipeline-split": "account_for_loss_in_pipeline_split",
    "--attention-softmax-in-fp32": "attention_softmax_in_fp32",
    "--apply-query-key-layer-scaling": "apply_query_key_layer_scaling",
    "--fp16-lm-cross-entropy": "fp16_lm_cross_entropy",
    "--cross-entropy-loss-fusion": "cross_entropy_loss_fusion",
    "--recompute-activations": "recompute_activations",
    "--moe-grouped-gemm": "moe_grouped_gemm",
    "--moe-permute-fusion": "moe_permute_fusion",
    "--moe-router-fusion": "moe_router_fusion",
    "--moe-tp-extend-ep": "moe_tp_extend_ep",
    "--moe-router-enable-expert-bias": "moe_router_enable_expert_bias",
    "--moe-shared-expert-gate": "moe_shared_expert_gate",
    "--use-flash-attn": "use_flash_attn",
    "--bias-dropout-fusion": "use_bias_dropout_fusion",
    "--masked-softmax-fusion": "use_masked_softmax_fusion",
    "--use-fused-swiglu": "use_fused_swiglu",
    "--use-fused-rmsnorm": "use_fused_rmsnorm",
    "--use-fused-layernorm": "use_fused_layernorm",
    "--use-fused-rotary-pos-emb": "use_fused_rotary_pos_emb",
    "--use-fused-cross-entropy": "use_fused_cross_entropy",
    "--use-fused-linear-cross-entropy": "use_fused_linear_cross_entropy",
    "--use-fused-adamw": "use_fused_adamw",
    "--reuse-fp32-param": "reuse_fp32_param",
    "--swap-optimizer": "swap_optimizer",
    "--recompute-activation-function": "recompute_activation_function",
    "--recompute-norm": "recompute_norm",
    "--use-cp-send-recv-overlap": "use_cp_send_recv_overlap",
    "--use-ulysses-allgather-kv": "use_ulysses_allgather_kv",
    "--reset-attention-mask": "reset_attention_mask",
    "--sft": "sft",
    "--dataloader-inter-document-masking": "dataloader_inter_document_masking",
    "--moe-pad-expert-input-to-capacity": "moe_pad_expert_input_to_capacity",
    "--overlap-moe-expert-parallel-comm": "overlap_moe_expert_parallel_comm",
    "--balanced-moe-experts": "balanced_moe_experts",
    "--moe-fb-overlap": "moe_fb_overlap",
    "--swap-attention": "swap_attention",
}
# MindSpeed-LLM's, for an activation with a gate.
GATED = {"--geglu": "quick_geglu", "--gelu-tanh": "quick_geglu"}
# Switches that affect only time.
TIMED = {
    "--tp-comm-overlap": "tp_comm_overlap",
    "--moe-enable-deepep": "moe_enable_deepep",
    "--enable-cuda-graph": "enable_cuda_graph",
    "--external-cuda-graph": "external_cuda_graph",
    "--overlap-grad-reduce": "overlap_grad_reduce",
    "--overlap-param-gather": "overlap_param_gather",
    "--gradient-accumulation-fusion": "fuses_accumulation",
    "--moe-alltoall-overlap-comm": "moe_alltoall_overlap_comm",
    "--moe-allgather-overlap-comm": "moe_allgather_overlap_comm",
    "--moe-alltoall-mc2": "moe_alltoall_mc2",
    "--use-ascend-coc": "use_ascend_coc",
    "--use-ascend-mc2": "use_ascend_mc2",
}
# Features without predicted effect on time, and what is predicted instead.
NOT_TIMED = {
    "--moe-hierarchical-alltoallv": "the exchange of tokens is priced as one all-to-all",
    "--moe-wgrad-side-stream": "weight gradients of experts are priced as if nothing ran beside them",
    "--swap-attention": "copies to the host are taken to be hidden",
    "--balanced-moe-experts": "experts have the load of --expert-imbalance, and their copies are not priced",
    "--balance-sequence-lengths": "all sequences are taken to be of one length",
    "--recompute-in-bubble": "recomputation is priced before the backward pass that needs it",
    "--recompute-in-advance": "recomputation is priced before the backward pass that needs it",
}
TIMED_OFF = {"--no-gradient-accumulation-fusion": "fuses_accumulation"}
# Switches that set a name to False.
OFF = {
    "--disable-bias-linear": "add_bias_linear",
    "--no-position-embedding": "add_position_embedding",
    "--no-create-attention-mask-in-dataloader": "create_attention_mask_in_dataloader",
    "--no-bias-swiglu-fusion": "bias_swiglu_fusion",
    "--no-bias-gelu-fusion": "bias_gelu_fusion",
    "--no-bias-dropout-fusion": "bias_dropout_fusion",
    "--no-masked-softmax-fusion": "masked_softmax_fusion",
    "--disable-jit-fuser": "jit_fuser",
}
INTEGERS = {
    "--num-layers": "num_layers",
    "--hidden-size": "hidden_size",
    "--ffn-hidden-size": "ffn_hidden_size",
    "--num-attention-heads": "num_attention_heads",
    "--kv-channels": "kv_channels",
    "--q-lora-rank": "q_lora_rank",
    "--kv-lora-rank": "kv_lora_rank",
    "--qk-head-dim": "qk_head_dim",
    "--qk-pos-emb-head-dim": "qk_pos_emb_head_dim",
    "--v-head-dim": "v_head_dim",
    "--mtp-num-layers": "mtp_num_layers",
    "--num-query-groups": "num_query_groups",
    "--seq-length": "seq_length",
    "--max-position-embeddings": "max_position_embeddings",
    "--micro-batch-size": "micro_batch_size",
    "--global-batch-size": "global_batch_size",
    "--vocab-size": "vocab_size",
    "--padded-vocab-size": "padded_vocab_size",
    "--make-vocab-size-divisible-by": "make_vocab_size_divisible_by",
    "--tensor-model-parallel-size": "tensor_model_parallel_size",
    "--pipeline-model-parallel-size": "pipeline_model_parallel_size",
    "--expert-model-parallel-size": "expert_model_parallel_size",
    "--expert-tensor-parallel-size": "expert_tensor_parallel_size",
    "--context-parallel-size": "context_parallel_size",
    "--ulysses-degree-in-cp": "ulysses_degree_in_cp",
    "--cp-window-size": "cp_window_size",
    "--context-parallel-cache-interval": "context_parallel_cache_interval",
    "--num-layers-per-virtual-pipeline-stage": "num_layers_per_virtual_pipeline_stage",
    "--num-virtual-stages-per-pipeline-rank": "num_virtual_stages_per_pipeline_rank",
    "--microbatch-group-size-per-virtual-pipeline-stage": "microbatch_group_size_per_vp_stage",
    "--decoder-first-pipeline-num-layers": "decoder_first_pipeline_num_layers",
    "--decoder-last-pipeline-num-layers": "decoder_last_pipeline_num_layers",
    "--num-experts": "num_experts",
    "--moe-router-topk": "moe_router_topk",
    "--moe-ffn-hidden-size": "moe_ffn_hidden_size",
    "--moe-shared-expert-intermediate-size": "moe_shared_expert_intermediate_size",
    "--recompute-num-layers": "recompute_num_layers",
    "--recompute-activation-function-num-layers": "recompute_activation_function_num_layers",
    "--recompute-norm-num-layers": "recompute_norm_num_layers",
    "--balanced-moe-hot-expert-num": "balanced_moe_hot_expert_num",
    "--moe-zero-memory-num-layers": "moe_zero_memory_num_layers",
}
NUMBERS = {
    "--hidden-dropout": "hidden_dropout",
    "--attention-dropout": "attention_dropout",
    "--moe-expert-capacity-factor": "moe_expert_capacity_factor",
}
TEXTS = {
    "--normalization": "normalization",
    "--position-embedding-type": "position_embedding_type",
    "--rope-type": "rope_type",
    "--pipeline-model-parallel-layout": "pipeline_model_parallel_layout",
    "--tokenizer-type": "tokenizer_type",
    "--optimizer": "optimizer",
    "--moe-layer-freq": "moe_layer_freq",
    "--moe-zero-memory": "moe_zero_memory",
    "--moe-token-dispatcher-type": "moe_token_dispatcher_type",
    "--attention-backend": "attention_backend",
    "--quant-states": "quant_states",
    "--grad-reduce-compression": "grad_reduce_compression",
    "--grad-reduce-compression-scope": "grad_reduce_compression_scope",
    "--cuda-graph-impl": "cuda_graph_impl",
    "--window-attn-skip-freq": "window_attn_skip_freq",
    "--recompute-granularity": "recompute_granularity",
    "--recompute-method": "recompute_method",
    "--transformer-impl": "transformer_impl",
    "--context-parallel-algo": "context_parallel_algo",
    "--context-parallel-kv-cache-policy": "context_parallel_kv_cache_policy",
    "--pipeline-schedule": "pipeline_schedule",
    "--schedules-method": "schedules_method",
    "--swap-modules": "swap_modules",
}
# Integers that may be 0.
FROM_ZERO = (
    "--mtp-num-layers",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--context-parallel-cache-interval",
)
# Upper bound of numbers: layers are enumerated.
LARGEST = 10**12
# Each schedule step is simulated.
MOST_MICRO_BATCHES = 65_536
MOST = {
    "--num-layers": 1_000,
    "--mtp-num-layers": 100,
    "--num-experts": 100_000,
    "--num-attention-heads": 100_000,
    "--num-virtual-stages-per-pipeline-rank": 10_000,
}
CHOICES = {
    "recompute_granularity": ("full", "selective"),
    "recompute_method": ("uniform", "block"),
    "moe_zero_memory": ("disable", "level0", "level1"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "grad_reduce_compression": ("int8", "fp8", "bf16"),
    "grad_reduce_compression_scope": ("auto", "all", "between-nodes"),
}
# Flags with any number of values.
LISTS = {
    "--virtual-optimizer": "virtual_optimizer",
    "--cp-comm-type": "cp_comm_type",
    "--hierarchical-context-parallel-sizes": "hierarchical_context_parallel_sizes",
    "--recompute-modules": "recompute_modules",
    "--moe-aux-loss-coeff": "moe_aux_loss_coeff",
    "--moe-router-load-balancing-type": "moe_router_load_balancing_type",
}
# Supported `--recompute-modules`.
MODULES = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "mla_up_proj", "shared_experts")
REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size")

# Flags with unsupported effects on memory, and why; 0 or none disables them.
REFUSED = {
    "--yaml-cfg": "the arguments in a file are not read: give them as flags",
    "--experimental-attention-variant": "other kinds of attention are not predicted",
    "--mla-down-proj-fusion": "it needs Transformer Engine: leave it out",
    "--mtp-use-repeated-layer": "one layer for all further tokens is not predicted",
    "--mtp-detach-heads": "it is not predicted",
    "--hybrid-layer-pattern": "hybrid models are not predicted",
    "--fp8-format": "training in fp8 is not predicted",
    "--fp4-format": "training in fp4 is not predicted",
    "--cpu-offloading-num-layers": "offloading of activations is not predicted",
    "--fine-grained-activation-offloading": "offloading of activations is not predicted",
    "--use-megatron-fsdp": "fully sharded data parallelism is not predicted",
    "--use-torch-fsdp2": "fully sharded data parallelism is not predicted",
    "--use-precision-aware-optimizer": "it needs Transformer Engine; --quant-states does without",
    "--optimizer-cpu-offload": "it is not predicted: --virtual-optimizer is",
    "--distribute-saved-activations": "it is not predicted",
    "--moe-latent-size": "latent experts are not predicted",
    "--num-distributed-optimizer-instances": "more than one instance of the distributed optimizer is not predicted",
    "--heterogeneous-layers-config-path": "heterogeneous models are not predicted",
    "--adaptive-memory": "what is kept is decided in the training, within --memory-budget: leave it out",
    "--mindspeed-lite-auto": "which features it turns on is decided in the training: give their flags",
}
# Of these, disabled by 1.
COUNTED_FROM_ONE = ("--num-distributed-optimizer-instances",)
# MindSpeed flags, always refused.
FOREIGN = {"--noop-layers": "it is MindSpeed's: `mindspeed-lite migrate` writes Megatron's layout in its place"}
