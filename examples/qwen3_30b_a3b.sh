#!/usr/bin/env bash
# Qwen3-30B-A3B, 16 devices: pipeline parallel 2, expert parallel 8, recomputation of every layer.
#
#   DATA_PATH=... TOKENIZER=... CHECKPOINTS=... examples/qwen3_30b_a3b.sh    on every node, with NODE_RANK and MASTER_ADDR
#   examples/qwen3_30b_a3b.sh --tiny      the same flags at small sizes with mock data, two processes on this machine
#   examples/qwen3_30b_a3b.sh --print     the command alone; further arguments go to the training script
set -euo pipefail

NODES=2 DEVICES=8
MODEL=(
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --kv-channels 128
    --group-query-attention --num-query-groups 4 --qk-layernorm --seq-length 4096 --max-position-embeddings 40960
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
    --position-embedding-type rope --rotary-base 1000000
    --untie-embeddings-and-output-weights --padded-vocab-size 151936
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-router-score-function softmax
    --moe-router-dtype fp32 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3
    --moe-token-dispatcher-type alltoall
)
LAYOUT=(
    --pipeline-model-parallel-size 2 --expert-model-parallel-size 8
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
TRAINING=(
    --micro-batch-size 1 --global-batch-size 256 --train-iters 2000 --bf16
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01 --weight-decay 0.1 --clip-grad 1.0
    --adam-beta1 0.9 --adam-beta2 0.95 --attention-dropout 0 --hidden-dropout 0
    --split 99,1,0 --eval-interval 1000 --eval-iters 0
)
FEATURES=(
    --use-flash-attn --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb --use-fused-adamw
    --use-fused-cross-entropy --use-fused-embedding --gradient-accumulation-fusion --reset-bucket-group-order
    --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion --swap-optimizer
)
TINY=(
    --num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 --kv-channels 32
    --num-query-groups 2 --seq-length 128 --max-position-embeddings 128 --padded-vocab-size 512
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64
    --pipeline-model-parallel-size 1 --expert-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 4
)
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
