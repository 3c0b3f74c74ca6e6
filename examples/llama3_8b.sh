#!/usr/bin/env bash
# Llama-3-8B, 8 devices: tensor parallel 8 with sequence parallelism.
#
#   DATA_PATH=... TOKENIZER=... CHECKPOINTS=... examples/llama3_8b.sh    on every node, with NODE_RANK and MASTER_ADDR
#   examples/llama3_8b.sh --tiny      the same flags at small sizes with mock data, two processes on this machine
#   examples/llama3_8b.sh --print     the command alone; further arguments go to the training script
set -euo pipefail

NODES=1 DEVICES=8
MODEL=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --position-embedding-type rope --rotary-base 500000
    --untie-embeddings-and-output-weights --padded-vocab-size 128256
)
LAYOUT=(--tensor-model-parallel-size 8 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce
        --overlap-param-gather)
TRAINING=(
    --micro-batch-size 2 --global-batch-size 64 --train-iters 2000 --bf16
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01 --weight-decay 0.1 --clip-grad 1.0
    --adam-beta1 0.9 --adam-beta2 0.95 --attention-dropout 0 --hidden-dropout 0
    --split 99,1,0 --eval-interval 1000 --eval-iters 0
)
FEATURES=(
    --use-flash-attn --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb --use-fused-adamw
    --use-fused-linear-cross-entropy --use-fused-embedding --gradient-accumulation-fusion
    --reset-bucket-group-order --reuse-fp32-param --use-ascend-coc --coc-parallel-num auto
)
TINY=(
    --num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 --num-query-groups 2
    --seq-length 128 --max-position-embeddings 128 --padded-vocab-size 512
    --tensor-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 4
)
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
