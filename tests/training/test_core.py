"""Megatron-core alone, every release: the device layer trains, features agree with off, layouts agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.harness import checkouts, matrix
from tests.harness.core_trainings import CONFIGURED, DRIFT, FEATURES, LAYOUTS, fault, losses
from tests.harness.training import Trainer

STEPS = 6


@pytest.mark.parametrize(
    ("release", "layout"),
    matrix.pairs([*LAYOUTS], [("0.16.1", "tp2_sp")], newest=["pp2_vpp2"]),
)
def test_features_train_as_off_does(trainer: Callable[[str], Trainer], release: str, layout: str) -> None:
    nproc, options = LAYOUTS[layout]
    options = {**options, "steps": STEPS}
    off = trainer(release).core("device", nproc, options)
    on = trainer(release).core("features", nproc, {**options, **CONFIGURED}, flags=FEATURES)
    assert len(losses(off)) == STEPS and losses(off)[-1] < losses(off)[0] - 0.3, "the model does not learn"
    assert losses(on) != losses(off), "the features changed no bit: they were not in force"
    assert fault(off.history(), on.history()) == ""
    assert "RNG state changed" not in on.log()


# With biases, and with the attention that makes scores: what a model without our attention still runs.
PLAIN = {"bias_dropout_fusion": True}
FUSIONS = {"use_bias_dropout_fusion": True, "use_masked_softmax_fusion": True, "strict": True}


@pytest.mark.parametrize(
    ("release", "layout"),
    matrix.pairs(["single", "tp2_sp", "pp2"], [("0.16.1", "single")], newest=["tp2_sp"]),
)
def test_sums_and_softmax_train_as_megatrons_own(trainer: Callable[[str], Trainer], release: str, layout: str) -> None:
    nproc, options = LAYOUTS[layout]
    off = trainer(release).core("device", nproc, {**options, "bias": True, "config": PLAIN, "steps": STEPS})
    fused = {**options, "bias": True, "softmax_fusion": True, "config": PLAIN, "steps": STEPS}
    on = trainer(release).core("features", nproc, fused, flags=FUSIONS)
    assert losses(off)[-1] < losses(off)[0] - 0.3 and losses(on) != losses(off)
    assert fault(off.history(), on.history()) == ""


@pytest.mark.parametrize("release", matrix.only(["0.19.2"], checkouts.ALL))
def test_recomputation_drops_the_same_again(trainer: Callable[[str], Trainer], release: str) -> None:
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    options = {"bias": True, "steps": STEPS}
    histories = [
        trainer(release)
        .core("features", 1, {**options, "dropout": 0.1, "config": {**PLAIN, **more}}, flags=FUSIONS)
        .history()
        for more in ({}, full)
    ]
    plain = losses(trainer(release).core("features", 1, {**options, "config": PLAIN}, flags=FUSIONS))
    with_dropout = [float.fromhex(loss) for loss, _ in histories[0]]
    assert histories[0] == histories[1] and with_dropout != plain
    assert abs(with_dropout[-1] - plain[-1]) < 0.2 * plain[-1]


@pytest.mark.parametrize("release", matrix.only(["0.16.1", "0.19.2"], checkouts.ALL))
def test_logits_that_are_never_made_train_as_others_do(trainer: Callable[[str], Trainer], release: str) -> None:
    options = {"tp": 2, "sp": True, "steps": STEPS}
    off = losses(trainer(release).core("device", 2, options))
    flags = {"use_fused_linear_cross_entropy": True, "strict": True}
    on = losses(trainer(release).core("features", 2, options, flags=flags))
    assert on != off, "the feature changed no bit: it was not in force"
    for step, (a, b) in enumerate(zip(off, on, strict=True)):
        assert abs(a - b) <= DRIFT * abs(a), f"step {step}: {a} off, {b} on"


@pytest.mark.parametrize("release", matrix.only(["0.19.2"], checkouts.ALL))
def test_parallel_layouts_agree_with_one_process(trainer: Callable[[str], Trainer], release: str) -> None:
    """Sequence parallelism changes who computes, not what; for the losses, and for the gradient of the first step.

    That one depends on the norms' gradients being summed over the ranks: without it, it is off by 3e-5 here, while the
    losses hardly move.
    """
    for arm, more, flags in (("device", {}, {}), ("features", CONFIGURED, {"flags": FEATURES})):
        sequence, tensor = (
            trainer(release).core(arm, 2, {**LAYOUTS[layout][1], "steps": STEPS, **more}, **flags)
            for layout in ("tp2_sp", "tp2")
        )
        for a, b in zip(losses(sequence), losses(tensor), strict=True):
            assert abs(a - b) <= DRIFT * abs(a)
        one, other = (float.fromhex(result.history()[0][1]) for result in (sequence, tensor))
        assert abs(one - other) <= 2.0**-17 * one


@pytest.mark.parametrize("release", ["0.17.1"])
@pytest.mark.parametrize("layout", matrix.only(["pp2_vpp2"], ["pp2_vpp2", "ep2"]))
def test_same_run_twice_is_bitwise_the_same(trainer: Callable[[str], Trainer], release: str, layout: str) -> None:
    """Pipelines send tensors whose storage Megatron frees in flight; a race would show here."""
    nproc, options = LAYOUTS[layout]
    job = {"arm": "device", "nproc": nproc, "options": {**options, "steps": STEPS}}
    first = trainer(release).core(**job)
    second = trainer(release).run(entry="core", **job).check()
    assert first.out != second.out and first.history() == second.history()


def test_dropout_draws_from_the_same_stream_every_time(trainer: Callable[[str], Trainer]) -> None:
    plain = {**LAYOUTS["tp2_sp"][1], "steps": STEPS}
    options = {**plain, "dropout": 0.1}
    first, second = (
        trainer("0.19.2").run(entry="core", arm="device", nproc=2, options=options).check() for _ in range(2)
    )
    assert first.history() == second.history()
    assert "RNG state changed" not in first.log()
    without = trainer("0.19.2").core("device", 2, plain)
    assert first.history() != without.history()


def test_a_mask_tensor_counts_as_much_as_a_causal_kernel(trainer: Callable[[str], Trainer]) -> None:
    options = {"steps": STEPS}
    kernel = losses(trainer("0.19.2").core("features", 1, options, flags=FEATURES))
    tensor = losses(trainer("0.19.2").core("features", 1, {**options, "mask_tensor": True}, flags=FEATURES))
    for a, b in zip(kernel, tensor, strict=True):
        assert abs(a - b) <= DRIFT * abs(a)


def test_qk_norm_gqa_and_zero_centred_gamma(trainer: Callable[[str], Trainer]) -> None:
    options: dict[str, Any] = {"query_groups": 2, "qk_layernorm": True, "steps": STEPS}
    off = losses(trainer("0.19.2").core("device", 1, options))
    on = losses(trainer("0.19.2").core("features", 1, options, flags=FEATURES))
    for a, b in zip(off, on, strict=True):
        assert abs(a - b) <= DRIFT * abs(a)
    # Megatron's local norm refuses zero-centred gamma; it is the same function, so the same losses are due.
    zero = {**options, "config": {"layernorm_zero_centered_gamma": True}}
    centred = losses(trainer("0.19.2").core("features", 1, zero, flags=FEATURES))
    for a, b in zip(on, centred, strict=True):
        assert abs(a - b) <= DRIFT * abs(a)
    refused = trainer("0.19.2").run(entry="core", arm="device", options=zero)
    assert refused.codes != [0]
