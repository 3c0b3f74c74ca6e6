#!/usr/bin/env bash
# Mixtral-8x7B, 64 devices: pipeline parallel 4, expert parallel 8.
#
#   DATA_PATH=... TOKENIZER=... CHECKPOINTS=... examples/mixtral_8x7b.sh    on every node, with NODE_RANK and MASTER_ADDR
#   examples/mixtral_8x7b.sh --tiny      the same flags at small sizes with mock data, two processes on this machine
#   examples/mixtral_8x7b.sh --print     the command alone; further arguments go to the training script
set -euo pipefail

NODES=8 DEVICES=8
MODEL=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 32768
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --position-embedding-type rope --rotary-base 1000000
    --untie-embeddings-and-output-weights --padded-vocab-size 32000
    --num-experts 8 --moe-router-topk 2 --moe-router-score-function softmax
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.02 --moe-token-dispatcher-type alltoall
)
LAYOUT=(
    --pipeline-model-parallel-size 4 --expert-model-parallel-size 8
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
TRAINING=(
    --micro-batch-size 1 --global-batch-size 256 --train-iters 2000 --bf16
    --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01 --weight-decay 0.1 --clip-grad 1.0
    --adam-beta1 0.9 --adam-beta2 0.95 --attention-dropout 0 --hidden-dropout 0
    --split 99,1,0 --eval-interval 1000 --eval-iters 0
)
FEATURES=(
    --use-flash-attn --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb --use-fused-adamw
    --use-fused-cross-entropy --use-fused-embedding --gradient-accumulation-fusion --reset-bucket-group-order
    --reuse-fp32-param --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion
)
TINY=(
    --num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 --num-query-groups 2
    --seq-length 128 --max-position-embeddings 128 --padded-vocab-size 512 --num-experts 4
    --pipeline-model-parallel-size 1 --expert-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 4
)
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
