# Read by the launch scripts beside it, which set MODEL, LAYOUT, TRAINING, FEATURES, TINY, NODES and DEVICES. Starts the
# training, or with --print prints its command. `--tiny` appends TINY, the same flags with small values, and mock data.

tiny=false print=false
own=()
for word in "$@"; do
    case $word in
        --tiny) tiny=true ;;
        --print) print=true ;;
        *) own+=("$word") ;;
    esac
done

# Without Transformer Engine; the adaptor would set both with a notice.
LOCAL=(--transformer-impl local --no-rope-fusion)

if $tiny; then
    NODES=1 DEVICES=2
    DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size 511)
    OUTPUT=(--train-iters 10 --log-interval 1)
    # Threads of two ranks on a small machine.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
else
    TINY=()
    if ! $print && [[ -z ${DATA_PATH:-} || -z ${TOKENIZER:-} || -z ${CHECKPOINTS:-} ]]; then
        echo "$0: set DATA_PATH (prefix of indexed data), TOKENIZER (a Hugging Face folder) and CHECKPOINTS (a folder)," \
             "or give --tiny" >&2
        exit 2
    fi
    DATA=(--data-path "${DATA_PATH:-DATA_PATH}" --tokenizer-type HuggingFaceTokenizer
          --tokenizer-model "${TOKENIZER:-TOKENIZER}")
    OUTPUT=(--save "${CHECKPOINTS:-CHECKPOINTS}" --load "${CHECKPOINTS:-CHECKPOINTS}" --save-interval 500 --log-interval 10)
fi

command=(torchrun --nnodes "$NODES" --nproc-per-node "$DEVICES")
if (( NODES > 1 )); then
    command+=(--node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-6000}")
else
    command+=(--standalone)
fi
if [[ -n ${SCRIPT:-} ]]; then
    command+=(-m mindspeed_lite run "$SCRIPT")
else
    command+=("$(dirname "${BASH_SOURCE[0]}")/pretrain_gpt.py")
fi
command+=("${LOCAL[@]}" "${MODEL[@]}" "${LAYOUT[@]}"
          "${TRAINING[@]}" "${FEATURES[@]}" "${DATA[@]}" "${OUTPUT[@]}" ${TINY[@]+"${TINY[@]}"} ${own[@]+"${own[@]}"})

if $print; then
    printf '%q ' "${command[@]}"
    echo
else
    exec "${command[@]}"
fi
