"""Bytes, against numbers that are known from elsewhere."""

from __future__ import annotations

import json

import pytest

from mindspeed_lite.planner import ArgumentError, changes, ranks, read, traces
from mindspeed_lite.planner.changes import _TOGGLES
from mindspeed_lite.planner.training import TrainingConfig

BASE = "--num-layers 8 --num-attention-heads 8 --vocab-size 1000 --bf16 --max-position-embeddings 64".split()


def training(
    *words: str, world_size: int = 1, hidden: int = 64, s: int = 32, b: int = 2, device: str = "cuda"
) -> TrainingConfig:
    shape = ["--hidden-size", str(hidden), "--seq-length", str(s), "--micro-batch-size", str(b)]
    return read([*BASE, *shape, *words], world_size, device)


def layer_bytes(training: TrainingConfig) -> int:
    (part,) = traces.of(training).layers.values()
    return sum(size for _, size in part.kept.values())


@pytest.mark.parametrize(("hidden", "s", "b"), [(64, 32, 2), (256, 64, 1)])
def test_a_gpt_layer_is_the_published_formula(hidden: int, s: int, b: int) -> None:
    """Reducing Activation Recomputation in Large Transformer Models: sbh (34 + 5 a s / h) in 16 bits."""
    statistics = 2 * 2 * 4 * s * b  # mean and deviation of two norms, which the paper leaves out
    assert layer_bytes(training(hidden=hidden, s=s, b=b)) == 34 * s * b * hidden + 5 * 8 * s * s * b + statistics


def test_sequence_parallelism_divides_all_of_it() -> None:
    """The same paper: sbh / t (34 + 5 a s / h) with it, sbh (10 + 24 / t + 5 a s / h / t) without."""
    s, b, hidden, t = 32, 2, 256, 4
    words = ("--tensor-model-parallel-size", "4")
    statistics, scores = 2 * 2 * 4 * s * b, 5 * 8 * s * s * b
    without = layer_bytes(training(*words, world_size=4, hidden=hidden, s=s, b=b))
    assert without - statistics == 10 * s * b * hidden + (24 * s * b * hidden + scores) // t
    divided = layer_bytes(training(*words, "--sequence-parallel", world_size=4, hidden=hidden, s=s, b=b))
    assert divided - statistics // t == (34 * s * b * hidden + scores) // t


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
        # Of a bf16 weight's main parameter the other 16 bits, as Megatron's store_param_remainders.
        ("--use-distributed-optimizer --use-precision-aware-optimizer", 4, 6 + (2 + 8) / 4),
        (
            "--use-distributed-optimizer --use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16 "
            "--exp-avg-sq-dtype fp8",
            4,
            4 + (2 + 2 + 1) / 4,
        ),
    ],
)
def test_bytes_of_a_parameter_are_those_of_the_features_pages(words: str, dp: int, width: float) -> None:
    (rank,) = ranks(training(*words.split(), world_size=dp))
    states = rank.states
    found = states.weights + states.gradients + states.optimizer
    assert abs(found - width * rank.parameters.total) < 3  # of rounding


def test_flags_of_layers_without_a_field_are_traced() -> None:
    """A residual stream in fp32 has twice the bytes where it is kept: the inputs of both norms."""
    plain, wide = (training(*words) for words in ((), ("--fp32-residual-connection",)))
    assert wide.traced_words == ("--fp32-residual-connection",)
    rows = 32 * 2 * 64
    assert layer_bytes(wide) - layer_bytes(plain) == 2 * 2 * rows


def test_states_of_transformer_engines_adam_stay_as_they_are() -> None:
    words = ("--use-distributed-optimizer", "--use-precision-aware-optimizer")
    flags = {each.flag.split()[0] for each in changes(training(*words, world_size=4))}
    assert "--use-distributed-optimizer" in flags and not flags & {
        "--reuse-fp32-param", "--quant-states", "--virtual-optimizer", "--swap-optimizer"
    }  # fmt: skip
    with pytest.raises(ArgumentError, match="--swap-optimizer does not apply with --use-precision-aware-optimizer"):
        training(*words, "--swap-optimizer", world_size=4)


def test_without_what_megatron_does_not_build_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "refused", {})
    asked = training("--softmax-type", "learnable", "--init-method-std", "0.02", s=16)
    request = json.dumps(traces.request(asked)[0], sort_keys=True)
    monkeypatch.setitem(traces.known, request, {"error": "needs a GPU"})
    assert layer_bytes(asked) == layer_bytes(training(s=16)) > 0
    assert traces.refused == {"--softmax-type learnable": "needs a GPU"}


def test_experts_are_divided_over_fewer_ranks() -> None:
    words = "--num-experts 8 --expert-model-parallel-size 2 --use-distributed-optimizer --no-bias-gelu-fusion".split()
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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fused_sums_and_softmax_keep_less_where_they_have_a_kernel(device: str) -> None:
    def kept(*words: str) -> int:
        return layer_bytes(training("--disable-jit-fuser", *words, device=device))

    tokens, scores = 32 * 2, 2 * 8 * 32 * 32
    # Two masks in 16 bits, after attention and after the MLP.
    assert kept() - kept("--bias-dropout-fusion") == (device == "cpu") * 2 * 2 * tokens * 64
    # On the CPU the scores in 16 bits and two numbers for each row come on top of the probabilities in 16 bits; it
    # keeps no probabilities in fp32.
    wide = "--attention-softmax-in-fp32"
    less = kept(wide) - kept(wide, "--masked-softmax-fusion")
    assert less == (device == "cpu") * (4 * scores - 2 * scores - 8 * scores // 32)


def test_full_recomputation_keeps_an_input_a_layer_and_one_layer() -> None:
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
    shape = {"s": 64, "hidden": 512}
    recomputed, plain = training("--use-flash-attn", *full, **shape), training("--use-flash-attn", **shape)
    (part,) = traces.of(recomputed).layers.values()
    hidden = 64 * 2 * 512 * 2
    assert part.kept == {"": (1, hidden)}
    assert sum(size for _, size in part.peak.values()) == layer_bytes(plain)
    (rank,) = ranks(recomputed)
    held = sum(line.bytes for line in rank.lines if line.part == "layers")
    assert held == pytest.approx(7 * hidden + layer_bytes(plain), rel=0.01)


def test_a_feature_that_is_on_and_one_that_is_off_are_seen_from_both_sides() -> None:
    on = {each.flag: each for each in changes(training("--use-flash-attn"))}
    off = {each.flag: each for each in changes(training())}
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
    (shared,) = [each for each in _TOGGLES if each.flag == "--reuse-fp32-param"]
    assert shared.applies(training()) and not shared.applies(training().replace(bf16=False))
