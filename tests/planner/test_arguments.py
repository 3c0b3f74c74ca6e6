"""The words of a command and what they say."""

from __future__ import annotations

import pytest

from mindspeed_lite.planner import ArgumentError, context, read
from mindspeed_lite.planner.arguments import misspelt

FURTHER = "--position-embedding-type rope --mtp-num-layers"
BY_HAND = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout"
CP = "--context-parallel-size 2"
LEAST = "--num-layers 4 --hidden-size 96 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2".split()


def test_defaults_are_those_of_megatron() -> None:
    training = read(LEAST)
    assert training.ffn_hidden_size == 4 * 96 and training.kv_channels == 24 and training.groups == 4
    assert training.padded_vocab_size == 50304  # GPT-2's 50257 words, to a multiple of 128
    assert training.width == 4 and training.normalization == "LayerNorm" and training.add_bias_linear
    assert training.global_batch_size == 2 and training.microbatches == 1
    assert read([*LEAST, "--swiglu"]).ffn_hidden_size == 256


def test_a_whole_command_is_read() -> None:
    words = "torchrun --nproc-per-node 8 -m mindspeed_lite run train.py".split()
    words += [*LEAST, "--tensor-model-parallel-size=2", "--pipeline-model-parallel-size", "2", "--sequence-parallel"]
    words += "--vocab-size 1000 --lr -1e-3 --split 9,1 --virtual-optimizer 20 10.5 --global-batch-size 16".split()
    training = read(words, 8)
    assert (training.tp, training.pp, training.dp, training.microbatches) == (2, 2, 2, 4)
    assert (
        training.virtual_optimizer == ("20", "10.5")
        and training.sequence_parallel
        and training.padded_vocab_size == 1024
    )


def test_ranks_that_share_a_sequence_have_one_batch() -> None:
    words = [*LEAST, "--context-parallel-size", "2", "--tensor-model-parallel-size", "2", "--global-batch-size", "8"]
    training = read(words, 8)
    assert (training.cp, training.dp, training.microbatches, training.flash) == (2, 2, 2, True)


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        ("--context-parallel-algo kvallgather_cp_algo", ["gathered"] * 4),
        ("--cp-comm-type p2p a2a all_gather a2a", ["ring", "ulysses", "gathered", "ulysses"]),
        ("--context-parallel-kv-cache-policy half --context-parallel-cache-interval 0", ["ring"] * 4),
        ("--use-ulysses-allgather-kv", ["ulysses"] * 4),
        ("--context-parallel-size 4 --ulysses-degree-in-cp 2", ["hybrid"] * 4),
        ("--cp-comm-type a2a+p2p --context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2", ["hybrid"] * 4),
        # Of 16 rows the products hide little, of 64 Ki rows all of a ring.
        ("", ["ulysses"] * 4),
        ("--seq-length 131072", ["ring"] * 4),
    ],
)
def test_the_algorithm_of_each_layer(words: str, kinds: list[str]) -> None:
    training = read([*LEAST, "--context-parallel-size", "2", *words.split()], 4)
    assert [context.algorithm(training, layer) for layer in range(4)] == kinds


def test_algorithms_have_the_names_that_the_feature_reads() -> None:
    from mindspeed_lite.patches._shared import context_parallel

    assert (context.ALGORITHMS, context.COMM_TYPES) == (context_parallel.ALGORITHMS, context_parallel.COMM_TYPES)


def test_experts_are_spread_over_what_is_left() -> None:
    words = [*LEAST, "--num-experts", "8", "--tensor-model-parallel-size", "2", "--expert-model-parallel-size", "2"]
    training = read(words, 8)
    assert (training.dp, training.ep, training.etp, training.edp) == (4, 2, 2, 2)
    whole = read([*words, "--moe-tp-extend-ep"], 8)
    assert (whole.ep, whole.etp, whole.edp) == (4, 1, 2)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("1", [1, 1, 1, 1]), ("2", [1, 0, 1, 0]), ("[0,1,1,1]", [0, 1, 1, 1]), ("([0]*1+[1]*1)*2", [0, 1, 0, 1])],
)
def test_which_layers_have_experts(pattern: str, expected: list[int]) -> None:
    training = read([*LEAST, "--num-experts", "8", "--moe-layer-freq", pattern])
    assert [int(training.is_moe(layer)) for layer in range(4)] == expected


@pytest.mark.parametrize(
    ("more", "world_size", "words"),
    [
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 6, ("6 ranks", "multiple of 4")),
        ("--num-attention-heads 6 --tensor-model-parallel-size 4", 4, ("--num-attention-heads 6", "change one")),
        ("--num-experts 6 --expert-model-parallel-size 4", 4, ("--num-experts 6", "change one")),
        ("--num-experts 6 --expert-model-parallel-size 3", 4, ("4 ranks", "--expert-model-parallel-size 3")),
        ("--global-batch-size 6", 2, ("--global-batch-size 6", "change one")),
        ("--num-layers many", 1, ("--num-layers", "'many'")),
        ("--hidden-size", 1, ("--hidden-size", "give one")),
        ("--hidden-size 0", 1, ("--hidden-size", "at least 1")),
        ("--optimizer sgd", 1, ("--optimizer sgd", "adam")),
        ("--multi-latent-attention", 1, ("--multi-latent-attention", "add --use-flash-attn")),
        (f"{BY_HAND} Ettx|ttL", 2, ("Ettx|ttL", "'x' is none of")),
        (f"{BY_HAND} Ett|t|tL", 2, ("3 parts", "--pipeline-model-parallel-size 2")),
        (f"{BY_HAND} tt|ttL", 2, ("one E",)),
        (f"{BY_HAND} Ett|tL", 2, ("3 letters t", "--num-layers 4")),
        (f"{BY_HAND} Ett|ttmL", 2, ("1 letters m", "--mtp-num-layers 0")),
        (f"{FURTHER} 2 {BY_HAND} Ett|tt|m|mL", 2, ("all letters m are in one part",)),
        (f"{FURTHER} 1 {BY_HAND} Ett|tm|t|L", 2, ("all letters m are in one part",)),
        (f"{FURTHER} 1 {BY_HAND} Ett|t|mt|L", 2, ("every t is before m",)),
        (f"{BY_HAND} Ett|ttL --num-virtual-stages-per-pipeline-rank 2", 2, ("leave --num-virtual-stages",)),
        ("--context-parallel-size 2 --tensor-model-parallel-size 2", 6, ("6 ranks", "multiple of 4")),
        ("--context-parallel-size 3", 3, ("--seq-length 32", "--context-parallel-size 3")),
        (f"{CP} --context-parallel-algo ring", 2, ("--context-parallel-algo ring", "ulysses_cp_algo")),
        (f"{CP} --cp-comm-type p2p a2a", 2, ("--cp-comm-type has 2", "4 layers")),
        (f"{CP} --cp-comm-type ring", 2, ("--cp-comm-type ring", "a2a+p2p")),
        (f"{CP} --context-parallel-algo hybrid_cp_algo", 2, ("--ulysses-degree-in-cp", "add it")),
        (f"{CP} --ulysses-degree-in-cp 2", 2, ("--ulysses-degree-in-cp 2", "between 1 and it")),
        (f"{CP} --context-parallel-kv-cache-policy all", 2, ("--context-parallel-kv-cache-policy", "'all'")),
        (f"{CP} --reset-attention-mask", 2, ("--reset-attention-mask", "not predicted")),
        (
            f"{CP} --cp-comm-type a2a --num-attention-heads 3",
            2,
            ("3 query heads", "unequal", "--context-parallel-algo"),
        ),
        (
            "--context-parallel-size 2 --tensor-model-parallel-size 4 --sequence-parallel --seq-length 24",
            8,
            ("--seq-length 24", "cannot be divided by 16"),
        ),
        ("--quant-states int4", 1, ("--quant-states", "bf16 or fp8", "'int4'")),
        ("--recompute-granularity full", 1, ("--recompute-method",)),
        ("--virtual-optimizer 1 2", 1, ("--virtual-optimizer", "give one")),
        ("--swap-optimizer --virtual-optimizer all", 1, ("--swap-optimizer", "drop one")),
        ("--virtual-optimizer much", 1, ("--virtual-optimizer", "'much'")),
        ("--moe-layer-freq x --num-experts 2", 1, ("--moe-layer-freq", "'x'")),
        ("--moe-layer-freq [1] --num-experts 2", 1, ("--moe-layer-freq", "4 layers")),
        ("--tokenizer-type HuggingFaceTokenizer", 1, ("HuggingFaceTokenizer", "--vocabulary N")),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(more: str, world_size: int, words: tuple[str, ...]) -> None:
    with pytest.raises(ArgumentError) as error:
        read([*LEAST, *more.split()], world_size)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("flag", LEAST[::2])
def test_what_is_needed_is_named(flag: str) -> None:
    place = LEAST.index(flag)
    with pytest.raises(ArgumentError, match=f"{flag} is not in the command"):
        read([*LEAST[:place], *LEAST[place + 2 :]])


def test_a_value_that_asks_for_nothing_is_not_refused() -> None:
    assert read([*LEAST, "--hybrid-layer-pattern", "none", "--cpu-offloading-num-layers", "0"]).tp == 1
    assert read([*LEAST, "--mtp-num-layers", "0"]).mtp_num_layers == 0
    with pytest.raises(ArgumentError, match="--cpu-offloading-num-layers 1"):
        read([*LEAST, "--cpu-offloading-num-layers", "1"])


def test_a_flag_that_looks_like_another_is_told() -> None:
    words = ["--tensor-model-paralel-size", "2", "--lr", "1", "--num-layers", "2", "--use-flash-atn"]
    assert misspelt(words) == [
        ("--tensor-model-paralel-size", "--tensor-model-parallel-size"),
        ("--use-flash-atn", "--use-flash-attn"),
    ]
