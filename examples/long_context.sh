#!/usr/bin/env bash
# A sequence that one process cannot hold under a memory limit, and four can: context parallelism on the CPU.
#
#   examples/long_context.sh 1      one process: ends with "can't allocate memory"
#   examples/long_context.sh 4      the same sequence over four: trains a step
#
# LIMIT is the MiB of heap and anonymous memory that each process may take, SEQ the tokens of a sequence. Further
# arguments go to the training script.
set -euo pipefail

RANKS=${1:?how many processes share a sequence: 1 or 4}
shift
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} MINDSPEED_LITE_DEVICE=cpu
SEQ=${SEQ:-16384}
command=(
    torchrun --standalone --nproc-per-node "$RANKS" "$(dirname "${BASH_SOURCE[0]}")/pretrain_gpt.py"
    --transformer-impl local --no-rope-fusion
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 4096 --num-attention-heads 4
    --seq-length "$SEQ" --max-position-embeddings "$SEQ" --normalization RMSNorm --swiglu --disable-bias-linear
    --position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 --log-interval 1 --eval-iters 0
    --eval-interval 1000 --disable-jit-fuser
    --mock-data --tokenizer-type NullTokenizer --vocab-size 1023
    --use-flash-attn --context-parallel-size "$RANKS" "$@"
)
ulimit -d $((${LIMIT:-2400} * 1024))
exec "${command[@]}"
