"""Bytes, against numbers that are known from elsewhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_lite.planner import activations, changes, ranks, read
from mindspeed_lite.planner.training import TrainingConfig

BASE = "--num-layers 8 --num-attention-heads 8 --vocab-size 1000 --bf16 --max-position-embeddings 64".split()


def training(
    *words: str, world_size: int = 1, hidden: int = 64, s: int = 32, b: int = 2, device: str = "cuda"
) -> TrainingConfig:
    shape = ["--hidden-size", str(hidden), "--seq-length", str(s), "--micro-batch-size", str(b)]
    return read([*BASE, *shape, *words], world_size, device)


def layer_bytes(training: TrainingConfig) -> int:
    return sum(entry.bytes for entry in activations.layer(training, 0, 0, 0))


@given(st.integers(1, 8), st.integers(1, 64), st.integers(1, 4))
def test_a_gpt_layer_is_the_published_formula(h: int, s: int, b: int) -> None:
    """Reducing Activation Recomputation in Large Transformer Models: sbh (34 + 5 a s / h) in 16 bits."""
    hidden, heads = 64 * h, 8
    found = layer_bytes(training(hidden=hidden, s=s, b=b))
    statistics = 2 * 2 * 4 * s * b  # mean and deviation of two norms, which the paper leaves out
    assert found - statistics == 34 * s * b * hidden + 5 * heads * s * s * b


@given(st.integers(1, 8), st.sampled_from([32, 64]), st.sampled_from([1, 2]))
def test_sequence_parallelism_divides_all_of_it(h: int, s: int, b: int) -> None:
    """The same paper: sbh / t (34 + 5 a s / h) with it, sbh (10 + 24 / t + 5 a s / h / t) without."""
    hidden, heads, t = 64 * h, 8, 4
    words = ("--tensor-model-parallel-size", "4")
    statistics = 2 * 2 * 4 * s * b
    without = layer_bytes(training(*words, world_size=4, hidden=hidden, s=s, b=b)) - statistics
    assert without == 10 * s * b * hidden + (24 * s * b * hidden + 5 * heads * s * s * b) // t
    divided = layer_bytes(training(*words, "--sequence-parallel", world_size=4, hidden=hidden, s=s, b=b))
    assert divided - statistics // t == (34 * s * b * hidden + 5 * heads * s * s * b) // t


@pytest.mark.parametrize(
    ("words", "dp", "width"),
    [
        ("", 1, 18.0),
        ("--grad-reduce-in-bf16", 1, 16.0),
        ("--reuse-fp32-param", 1, 16.0),
        ("--quant-states bf16", 1, 14.0),
        ("--quant-states fp8", 1, 12 + 1 / 64),
        ("--reuse-fp32-param --quant-states fp8", 1, 10 + 1 / 64),
        ("--virtual-optimizer all", 1, 10.0),
        ("--swap-optimizer", 1, 6.0),
        ("--swap-optimizer --reuse-fp32-param", 1, 8.0),
        ("--swap-optimizer --quant-states fp8", 1, 6 + 1 / 64),
        ("", 4, 18.0),
        ("--grad-reduce-compression int8", 4, 20.0),
        ("--grad-reduce-compression int8 --use-distributed-optimizer", 4, 6 + 12 / 4 + 2 * 3 / 4),
        ("--use-distributed-optimizer", 4, 6 + 12 / 4),
        ("--use-distributed-optimizer --reuse-fp32-param", 4, 6 + 10 / 4),
        ("--use-distributed-optimizer --quant-states bf16", 4, 6 + 8 / 4),
        ("--use-distributed-optimizer --quant-states fp8 --reuse-fp32-param", 4, 6 + (4 + 1 / 64) / 4),
    ],
)
def test_bytes_of_a_parameter_are_those_of_the_features_pages(words: str, dp: int, width: float) -> None:
    (rank,) = ranks(training(*words.split(), world_size=dp))
    states = rank.states
    found = states.weights + states.gradients + states.optimizer
    assert abs(found - width * rank.parameters.total) < 3  # of rounding


def test_experts_are_divided_over_fewer_ranks() -> None:
    words = "--num-experts 8 --expert-model-parallel-size 2 --use-distributed-optimizer".split()
    (rank,) = ranks(training(*words, world_size=4))
    assert rank.states.optimizer == 12 * rank.parameters.dense // 4 + 12 * rank.parameters.experts // 2


def test_a_budget_of_host_memory_is_that_of_its_stage() -> None:
    words = "--pipeline-model-parallel-size 2 --virtual-optimizer 0.0001 all".split()
    first, second = ranks(training(*words, world_size=2))
    assert first.states.host == int(0.0001 * 2**30) and second.states.moments == 0 < second.states.host


def test_states_that_stream_are_in_host_memory_where_there_are_two_memories() -> None:
    (rank,) = ranks(training("--swap-optimizer"))
    assert rank.states.host == 12 * rank.parameters.total and rank.states.optimizer == 0
    (rank,) = ranks(training("--swap-optimizer", device="cpu"))
    assert rank.states.host == 0 and rank.states.optimizer == 12 * rank.parameters.total


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_fused_sums_and_softmax_keep_less_where_they_have_a_kernel(device: str) -> None:
    def kept(*words: str, s: int = 32) -> int:
        return layer_bytes(training("--transformer-impl", "local", *words, device=device, s=s))

    tokens, scores = 32 * 2, 2 * 8 * 32 * 32
    # Two masks of a byte, after attention and after the MLP.
    assert kept() - kept("--bias-dropout-fusion") == (device == "cpu") * 2 * tokens * 64
    # On the CPU the scores in 16 bits and two numbers for each row come on top of the probabilities in 16 bits, on an
    # NPU the mask of each layer; neither keeps probabilities in fp32.
    own = {"cpu": 2 * scores + 8 * scores // 32, "cuda": 0, "npu": 2 * 32 * 32}[device]
    for words, spared in (((), 0), (("--attention-softmax-in-fp32",), 4 * scores)):
        less = kept(*words) - kept(*words, "--masked-softmax-fusion")
        assert less == (spared - own if device != "cuda" else 0)
    assert kept("--masked-softmax-fusion", "--no-masked-softmax-fusion") == kept()
    wide = training("--transformer-impl", "local", "--attention-softmax-in-fp32", device=device)
    offered = {change.flag for change in changes(wide)}
    wanted = {"cpu": {"--bias-dropout-fusion", "--masked-softmax-fusion"}, "npu": {"--masked-softmax-fusion"}}
    assert offered & wanted["cpu"] == wanted.get(device, set())
    # Lengths that the NPU's operator does not take.
    words = ("--attention-softmax-in-fp32", "--max-position-embeddings", "8192")
    for length in (48, 4128):
        fewer = kept(*words, s=length) - kept(*words, "--masked-softmax-fusion", s=length)
        assert (fewer > 0) == (device == "cpu")


def test_full_recomputation_keeps_an_input_a_layer_and_one_layer() -> None:
    words = (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --hidden-dropout 0".split()
    )
    (rank,) = ranks(training(*words, s=64, hidden=512))
    hidden = 64 * 2 * 512 * 2
    lines = {line.name: line for line in rank.lines}
    assert lines["input, of which a layer is recomputed"].bytes == 8 * hidden
    plain = layer_bytes(training("--hidden-dropout", "0", s=64, hidden=512))
    assert lines["recomputed"].bytes == plain - hidden


def test_the_mlp_gets_its_activation_back_before_attention_its_norm() -> None:
    """Of one layer at a time: what both features release never comes back together."""
    words = "--recompute-norm --recompute-activation-function --use-fused-linear-cross-entropy".split()
    (rank,) = ranks(training(*words, s=64, hidden=512))
    lines = {(line.part, line.name): line for line in rank.lines}
    assert lines["mlp", "output of the activation"].count == 1
    assert ("attention", "input of the qkv layer") not in lines


def test_a_feature_that_is_on_and_one_that_is_off_are_seen_from_both_sides() -> None:
    on = {each.flag: each for each in changes(training("--use-flash-attn", s=64))}
    off = {each.flag: each for each in changes(training(s=64))}
    flag = "--use-flash-attn"
    assert on[flag].is_on and not off[flag].is_on
    assert (on[flag].without, on[flag].having) == (off[flag].without, off[flag].having)
    assert on[flag].having < on[flag].without
    assert on[flag].difference["activations"] == on[flag].having - on[flag].without


def test_what_does_not_apply_is_not_offered() -> None:
    flags = {each.flag for each in changes(training())}
    assert not flags & {"--use-fused-rmsnorm", "--sequence-parallel", "--use-distributed-optimizer"}
    assert {"--reuse-fp32-param", "--quant-states fp8", "--recompute-norm"} <= flags
    compressed = {each.flag: each.is_on for each in changes(training("--grad-reduce-compression", "fp8", world_size=2))}
    assert compressed["--grad-reduce-compression fp8"] and "--grad-reduce-compression int8" not in compressed
    assert "--reuse-fp32-param" not in {each.flag for each in changes(training().replace(bf16=False))}
