#!/usr/bin/env bash
# Qwen2.5-7B, 8 devices: pipeline parallel 4 (6, 8, 8 and 6 layers), data parallel 2.
#
#   DATA_PATH=... TOKENIZER=... CHECKPOINTS=... examples/qwen2_5_7b.sh    on every node, with NODE_RANK and MASTER_ADDR
#   examples/qwen2_5_7b.sh --tiny      the same flags at small sizes with mock data, two processes on this machine
#   examples/qwen2_5_7b.sh --print     the command alone; further arguments go to the training script
set -euo pipefail

NODES=1 DEVICES=8
MODEL=(
    --num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28
    --group-query-attention --num-query-groups 4 --add-qkv-bias --seq-length 8192 --max-position-embeddings 131072
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
    --position-embedding-type rope --rotary-base 1000000
    --untie-embeddings-and-output-weights --padded-vocab-size 152064
)
LAYOUT=(
    --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 6
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
TRAINING=(
    --micro-batch-size 1 --global-batch-size 64 --train-iters 2000 --bf16
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01 --weight-decay 0.1 --clip-grad 1.0
    --adam-beta1 0.9 --adam-beta2 0.95 --attention-dropout 0 --hidden-dropout 0
    --split 99,1,0 --eval-interval 1000 --eval-iters 0
)
FEATURES=(
    --use-flash-attn --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb --use-fused-adamw
    --use-fused-linear-cross-entropy --use-fused-embedding --gradient-accumulation-fusion
    --reset-bucket-group-order --reuse-fp32-param
)
TINY=(
    --num-layers 3 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 --num-query-groups 2
    --seq-length 128 --max-position-embeddings 128 --padded-vocab-size 512
    --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 2
    --micro-batch-size 1 --global-batch-size 4
)
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
