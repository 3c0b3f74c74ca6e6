#!/usr/bin/env bash
# DeepSeek-V3, 1024 devices: tensor parallel 2, pipeline parallel 16 with 2 virtual stages, expert parallel 64.
#
#   DATA_PATH=... TOKENIZER=... CHECKPOINTS=... examples/deepseek_v3.sh    on every node, with NODE_RANK and MASTER_ADDR
#   examples/deepseek_v3.sh --tiny      the same flags at small sizes with mock data, two processes on this machine
#   examples/deepseek_v3.sh --print     the command alone; further arguments go to the training script
set -euo pipefail

NODES=128 DEVICES=8
MODEL=(
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128
    --seq-length 4096 --max-position-embeddings 163840
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --padded-vocab-size 129280
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128
    --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm
    --position-embedding-type rope --rotary-base 10000 --rope-type yarn --rotary-scaling-factor 40
    --mscale 1.0 --mscale-all-dim 1.0
    --num-experts 256 --moe-layer-freq "([0]*3+[1]*58)" --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-router-num-groups 8
    --moe-router-group-topk 4 --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 --moe-router-dtype fp32
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-token-dispatcher-type alltoall
    --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3
)
LAYOUT=(
    --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 16
    --pipeline-model-parallel-layout "Et*3|(tt|)*29,m|L" --expert-model-parallel-size 64 --expert-tensor-parallel-size 1
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
TRAINING=(
    --micro-batch-size 1 --global-batch-size 8192 --train-iters 2000 --bf16
    --lr 2.2e-4 --min-lr 2.2e-5 --lr-decay-style cosine --lr-warmup-iters 20 --weight-decay 0.1 --clip-grad 1.0
    --adam-beta1 0.9 --adam-beta2 0.95 --attention-dropout 0 --hidden-dropout 0
    --split 99,1,0 --eval-interval 1000 --eval-iters 0
)
FEATURES=(
    --use-flash-attn --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb --use-fused-adamw
    --use-fused-cross-entropy --use-fused-embedding --gradient-accumulation-fusion
    --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion --swap-optimizer --swap-optimizer-times 4
)
TINY=(
    --num-layers 3 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4
    --seq-length 128 --max-position-embeddings 128 --padded-vocab-size 512
    --q-lora-rank 48 --kv-lora-rank 32 --qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 32
    --num-experts 8 --moe-layer-freq "([0]*1+[1]*2)" --moe-ffn-hidden-size 64
    --moe-shared-expert-intermediate-size 64 --moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout "Et|tt|m|L"
    --expert-model-parallel-size 1 --micro-batch-size 1 --global-batch-size 4 --lr-warmup-iters 1
)
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
