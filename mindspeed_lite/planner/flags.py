"""Flags that affect memory, and unsupported ones.

Names are Megatron's `dest`; defaults are Megatron's.
"""

from __future__ import annotations


def _same_name(flags: str) -> dict[str, str]:
    """Flags to the names that argparse derives."""
    return {flag: flag.removeprefix("--").replace("-", "_") for flag in flags.split()}


# Switches that set a name to True.
ON = _same_name(
    """
    --swiglu --squared-relu --quick-geglu --add-qkv-bias --qk-layernorm --multi-latent-attention
    --group-query-attention --untie-embeddings-and-output-weights --bf16 --fp16 --sequence-parallel
    --use-distributed-optimizer --accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16
    --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --attention-softmax-in-fp32
    --apply-query-key-layer-scaling --fp16-lm-cross-entropy --cross-entropy-loss-fusion --recompute-activations
    --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion --moe-tp-extend-ep --moe-router-enable-expert-bias
    --moe-shared-expert-gate --use-flash-attn --use-fused-swiglu --use-fused-rmsnorm --use-fused-layernorm
    --use-fused-rotary-pos-emb --use-fused-cross-entropy --use-fused-linear-cross-entropy --use-fused-adamw
    --reuse-fp32-param --swap-optimizer --recompute-activation-function --recompute-norm --use-cp-send-recv-overlap
    --use-ulysses-allgather-kv --reset-attention-mask --sft --dataloader-inter-document-masking
    --moe-pad-expert-input-to-capacity --overlap-moe-expert-parallel-comm --balanced-moe-experts --moe-fb-overlap
    --swap-attention --use-precision-aware-optimizer
    """
) | {
    "--bias-dropout-fusion": "use_bias_dropout_fusion",
    "--masked-softmax-fusion": "use_masked_softmax_fusion",
}
# MindSpeed-LLM's, for an activation with a gate.
GATED = {"--geglu": "quick_geglu", "--gelu-tanh": "quick_geglu"}
# Switches that affect only time.
TIMED = _same_name(
    """
    --tp-comm-overlap --moe-enable-deepep --enable-cuda-graph --external-cuda-graph --overlap-grad-reduce
    --overlap-param-gather --moe-alltoall-overlap-comm --moe-allgather-overlap-comm --moe-alltoall-mc2
    --use-ascend-coc --use-ascend-mc2
    """
) | {
    "--gradient-accumulation-fusion": "fuses_accumulation",
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
    "--mtp-detach-heads": "further tokens are priced with the backward of the layers before them",
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
INTEGERS = _same_name(
    """
    --num-layers --hidden-size --ffn-hidden-size --num-attention-heads --kv-channels --q-lora-rank --kv-lora-rank
    --qk-head-dim --qk-pos-emb-head-dim --v-head-dim --mtp-num-layers --num-query-groups --seq-length
    --max-position-embeddings --micro-batch-size --global-batch-size --vocab-size --padded-vocab-size
    --make-vocab-size-divisible-by --tensor-model-parallel-size --pipeline-model-parallel-size
    --expert-model-parallel-size --expert-tensor-parallel-size --context-parallel-size --ulysses-degree-in-cp
    --cp-window-size --context-parallel-cache-interval --num-layers-per-virtual-pipeline-stage
    --num-virtual-stages-per-pipeline-rank --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers
    --num-experts --moe-router-topk --moe-ffn-hidden-size --moe-shared-expert-intermediate-size
    --recompute-num-layers --recompute-activation-function-num-layers --recompute-norm-num-layers
    --balanced-moe-hot-expert-num --moe-zero-memory-num-layers
    """
) | {
    "--microbatch-group-size-per-virtual-pipeline-stage": "microbatch_group_size_per_vp_stage",
}
NUMBERS = _same_name("--hidden-dropout --attention-dropout --moe-expert-capacity-factor")
TEXTS = _same_name(
    """
    --normalization --position-embedding-type --rope-type --pipeline-model-parallel-layout --tokenizer-type
    --optimizer --moe-layer-freq --moe-zero-memory --moe-token-dispatcher-type --attention-backend --quant-states
    --grad-reduce-compression --grad-reduce-compression-scope --cuda-graph-impl --window-attn-skip-freq
    --recompute-granularity --recompute-method --transformer-impl --context-parallel-algo
    --context-parallel-kv-cache-policy --pipeline-schedule --schedules-method --swap-modules --main-grads-dtype
    --main-params-dtype --exp-avg-dtype --exp-avg-sq-dtype
    """
)
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
    "main_grads_dtype": ("fp32", "bf16"),
    "main_params_dtype": ("fp32", "fp16"),
    "exp_avg_dtype": ("fp32", "fp16", "bf16", "fp8"),
    "exp_avg_sq_dtype": ("fp32", "fp16", "bf16", "fp8"),
}
# Flags with any number of values.
LISTS = _same_name(
    """
    --virtual-optimizer --cp-comm-type --hierarchical-context-parallel-sizes --recompute-modules
    --moe-aux-loss-coeff --moe-router-load-balancing-type
    """
)
REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size")

DRY_RUN = "`mindspeed-lite dryrun` counts their memory"
# Flags with unsupported effects on memory, and why; 0 or none disables them.
REFUSED = {
    "--yaml-cfg": "the arguments in a file are not read: give them as flags",
    "--spec": f"a layer specification of your own is not traced: {DRY_RUN}",
    "--experimental-attention-variant": f"layers of other kinds of attention are not traced: {DRY_RUN}",
    "--linear-attention-freq": f"layers of other kinds of attention are not traced: {DRY_RUN}",
    "--hybrid-layer-pattern": f"hybrid models are not traced: {DRY_RUN}",
    "--mla-down-proj-fusion": "it needs Transformer Engine: leave it out",
    "--moe-latent-size": "Megatron builds latent experts with Transformer Engine alone",
    "--fp8-format": "training in fp8 is not predicted",
    "--fp4-format": "training in fp4 is not predicted",
    "--cpu-offloading-num-layers": "offloading of activations is not predicted",
    "--fine-grained-activation-offloading": "offloading of activations is not predicted",
    "--use-megatron-fsdp": "fully sharded data parallelism is not predicted",
    "--use-torch-fsdp2": "fully sharded data parallelism is not predicted",
    "--optimizer-cpu-offload": "it is not predicted: --virtual-optimizer is",
    "--num-distributed-optimizer-instances": "more than one instance of the distributed optimizer is not predicted",
    "--heterogeneous-layers-config-path": f"heterogeneous models are not traced: {DRY_RUN}",
    "--adaptive-memory": "what is kept is decided in the training, within --memory-budget: leave it out",
    "--mindspeed-lite-auto": "which features it turns on is decided in the training: give their flags",
}
# Of these, disabled by 1.
COUNTED_FROM_ONE = ("--num-distributed-optimizer-instances",)
# MindSpeed flags, always refused.
FOREIGN = {"--noop-layers": "it is MindSpeed's: `mindspeed-lite migrate` writes Megatron's layout in its place"}
