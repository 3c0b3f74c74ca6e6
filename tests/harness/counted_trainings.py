"""Trainings whose memory is counted: name -> (ranks, global batch size, arguments); a micro-batch is 2."""

from __future__ import annotations

# Large enough that what is kept for every layer is most of it, small enough for seconds.
RUN = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 2 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 2047 --log-interval 1 "
    "--eval-iters 0 --eval-interval 1000 --seed 42 --train-iters 10 --disable-jit-fuser --bf16"
)
GPT2 = f"{RUN} --hidden-dropout 0.1 --attention-dropout 0.1"
LLAMA = (
    f"{RUN} --ffn-hidden-size 384 --normalization RMSNorm --swiglu --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0"
)
# Untrained routers and few tokens: left to themselves they would spread unevenly.
MOE = (
    f"{LLAMA} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-router-force-load-balancing"
)
ON = "--use-flash-attn --use-fused-rmsnorm --use-fused-swiglu --use-fused-cross-entropy --use-fused-rotary-pos-emb"
GIVES_UP = (
    "--use-flash-attn --use-fused-rmsnorm --use-fused-linear-cross-entropy --recompute-norm "
    "--recompute-activation-function"
)
FULL = "--recompute-granularity full --recompute-num-layers 1 --recompute-method uniform"
BLOCK = FULL.replace("uniform", "block")
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
EP2 = "--expert-model-parallel-size 2"
CP2, GQA = "--context-parallel-size 2", "--group-query-attention --num-query-groups 2"
GROUPED = "--moe-grouped-gemm --moe-permute-fusion --moe-router-fusion"
SP, DISTRIBUTED = "--sequence-parallel", "--use-distributed-optimizer"
SHARED, STAGES = "--moe-shared-expert-intermediate-size", "--pipeline-model-parallel-layout"
CACHED = "--context-parallel-kv-cache-policy"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
WIDE_QUERIES = (
    "--multi-latent-attention --kv-lora-rank 32 --qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 24 "
    "--rotary-scaling-factor 40 --use-flash-attn"
)
LATENT = f"{WIDE_QUERIES} --q-lora-rank 48"
DEEPSEEK = (
    f"{MOE} {LATENT} --qk-layernorm {ON} {GROUPED} {PP2} --mtp-num-layers 1 --num-layers 3 "
    f"--moe-layer-freq ([0]*1+[1]*2) {SHARED} 64 {DISTRIBUTED}"
)
OVERLAPPED = f"--moe-fb-overlap --gradient-accumulation-fusion {EP2}"

# Name -> (ranks, global batch size, arguments); a micro-batch is 2.
TRAININGS: dict[str, tuple[int, int, str]] = {
    "dense, on": (1, 4, f"{LLAMA} {ON}"),
    "dense, gives up": (1, 2, f"{LLAMA} {GIVES_UP}"),
    "gpt2": (1, 4, GPT2),
    "narrow states": (1, 4, f"{LLAMA} {ON} --reuse-fp32-param --quant-states fp8"),
    "states in host memory": (1, 4, f"{LLAMA} {ON} --virtual-optimizer all"),
    "recomputed": (1, 4, f"{LLAMA} {ON} {FULL}"),
    "partly recomputed": (1, 4, f"{LLAMA} {BLOCK.replace('1', '2')}"),
    "grouped queries": (1, 4, f"{LLAMA} {GQA} --qk-layernorm"),
    "tp2 sp, on": (2, 2, f"{LLAMA} {ON} {TP2} {SP} --recompute-norm {GQA} --qk-layernorm"),
    "pp2 vpp2, on": (2, 8, f"{LLAMA} {ON} {VPP2}"),
    "dp2 distributed, on": (2, 8, f"{LLAMA} {ON} {DISTRIBUTED} --reuse-fp32-param --quant-states bf16"),
    "ep2": (2, 8, f"{MOE} {EP2}"),
    "ep2, on": (2, 4, f"{MOE} {ON} {GROUPED} {EP2} {SHARED} 256 {DISTRIBUTED} --recompute-activation-function"),
    "ep2, rows given up": (2, 4, f"{MOE} {ON} {GROUPED} {EP2} --moe-zero-memory level1 --moe-zero-memory-num-layers 2"),
    "tp2 pp2 ep2, on": (4, 8, f"{MOE} {ON} {GROUPED} {TP2} {SP} {PP2} {EP2} --expert-tensor-parallel-size 1"),
    # Sequences that are split over ranks.
    "cp2, an algorithm each": (2, 4, f"{LLAMA} {CP2} {GQA} --cp-comm-type p2p a2a all_gather p2p {DISTRIBUTED}"),
    "cp2, ulysses": (2, 2, f"{LLAMA} {ON} {CP2} --context-parallel-algo ulysses_cp_algo"),
    "cp2, ulysses, keys gathered": (2, 2, f"{LLAMA} {CP2} {GQA} --use-ulysses-allgather-kv"),
    "cp2, gpt2": (2, 4, f"{GPT2} {CP2} --context-parallel-algo megatron_cp_algo"),
    "cp2, recomputed": (2, 4, f"{LLAMA} {CP2} {FULL}"),
    "tp2 cp2 sp": (4, 4, f"{LLAMA} {ON} {CP2} {GQA} {TP2} {SP} {DISTRIBUTED}"),
    "cp4, hybrid": (4, 4, f"{LLAMA} --context-parallel-size 4 {GQA} --ulysses-degree-in-cp 2 {CACHED} half"),
    "cp2 ep2": (2, 4, f"{MOE} {CP2} {EP2} {DISTRIBUTED}"),
    # Latent attention and multi-token prediction, alone and together.
    "latent, queries wide, not yarn": (1, 2, f"{LLAMA} {WIDE_QUERIES} {ON} --num-layers 2 --rope-type rope"),
    "latent, norms recomputed": (1, 2, f"{LLAMA} {LATENT} --qk-layernorm {ON} {SELECTIVE} core_attn layernorm"),
    "latent, tp2 sp, further tokens, on": (
        2, 2, f"{LLAMA} {LATENT} --qk-layernorm {ON} {TP2} {SP} --mtp-num-layers 2 --num-layers 2 --recompute-norm",
    ),
    "latent, cp2, ring": (2, 2, f"{LLAMA} {LATENT} {CP2} {CACHED} full --mtp-num-layers 1"),
    "latent, cp2, ulysses": (2, 2, f"{LLAMA} {LATENT} --qk-layernorm {CP2} --context-parallel-algo ulysses_cp_algo"),
    "further tokens, pp2, tied": (2, 8, f"{GPT2} --position-embedding-type rope --mtp-num-layers 1 {PP2}"),
    "further tokens, partly recomputed": (1, 2, f"{LLAMA} --mtp-num-layers 1 {BLOCK}"),
    "stages by hand": (2, 8, f"{LLAMA} {ON} {PP2} {STAGES} E|tt|tt|L"),
    # What DeepSeek-V3's launch script has.
    "as DeepSeek-V3": (2, 8, f"{DEEPSEEK} {STAGES} Et|tt|m|L"),
    "as DeepSeek-V3, recomputed": (2, 8, f"{DEEPSEEK} {STAGES} Et|t|t,m|L {FULL}"),
    # Two micro-batches under way, tokens that are dropped or padded, and routing that is not even.
    "ep2, overlapped, on": (2, 16, f"{MOE} {ON} {GROUPED} {OVERLAPPED}"),
    "pp2 vpp2 ep2, overlapped": (4, 16, f"{MOE} {ON} {GROUPED} {VPP2} {OVERLAPPED}"),
    "pp2, dualpipev": (2, 8, f"{LLAMA} {ON} {PP2} --schedules-method dualpipev --gradient-accumulation-fusion"),
    "ep2, padded": (2, 8, f"{MOE} {EP2} --moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity"),
}  # fmt: skip
