"""Megatron-core alone, every release: the device layer trains, features agree with off, layouts agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests import releases

from .jobs import Result, Trainer

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "tp2": (2, {"tp": 2}),
    "tp2_sp": (2, {"tp": 2, "sp": True}),
    "pp2": (2, {"pp": 2}),
    "pp2_vpp2": (2, {"pp": 2, "vpp": 2, "layers": 4}),
    "dp2_distributed_optimizer": (2, {"distributed_optimizer": True}),
    "ep2": (2, {"ep": 2, "experts": 4}),
}
FEATURES = {"use_fused_rmsnorm": True, "use_flash_attn": True}
STEPS = 6

# bf16 keeps 8 bits, so one rounding moves an activation by up to 2^-9 of itself. The losses of two runs that round
# differently drift apart step by step; 2^-8 of the loss holds with room over the steps here, and a wrong mask,
# scale or missing gradient is off by far more.
DRIFT = 2.0**-8


def losses(result: Result) -> list[float]:
    return [float.fromhex(loss) for loss, _ in result.history()]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("release", releases.ALL)
def test_features_train_as_off_does(trainer: Callable[[str], Trainer], release: str, layout: str) -> None:
    nproc, options = LAYOUTS[layout]
    options = {**options, "steps": STEPS}
    off = losses(trainer(release).core("device", nproc, options))
    on_result = trainer(release).core("features", nproc, options, flags={**FEATURES, "strict": True})
    on = losses(on_result)
    assert len(off) == len(on) == STEPS
    assert off[-1] < off[0] - 0.3, "the model does not learn"
    assert on != off, "the features changed no bit: they were not in force"
    for step, (a, b) in enumerate(zip(off, on, strict=True)):
        assert abs(a - b) <= DRIFT * abs(a), f"step {step}: {a} off, {b} on"
    assert "RNG state changed" not in on_result.log()


@pytest.mark.parametrize("release", releases.ALL)
def test_parallel_layouts_agree_with_one_process(trainer: Callable[[str], Trainer], release: str) -> None:
    """A sequence-parallel run without the summed gradients of its norms would drift from the tensor-parallel one."""
    sequence = losses(trainer(release).core("device", 2, {"tp": 2, "sp": True, "steps": 12}))
    tensor = losses(trainer(release).core("device", 2, {"tp": 2, "steps": 12}))
    for a, b in zip(sequence, tensor, strict=True):
        assert abs(a - b) <= DRIFT * abs(a)


def test_same_run_twice_is_bitwise_the_same(trainer: Callable[[str], Trainer]) -> None:
    """Pipelines send tensors whose storage Megatron frees in flight; a race would show here."""
    for nproc, options in (LAYOUTS["pp2_vpp2"], LAYOUTS["ep2"]):
        first, second = (
            trainer("0.17.1").core("device", nproc, {**options, "steps": STEPS}).history() for _ in range(2)
        )
        assert first == second


def test_dropout_draws_from_the_same_stream_every_time(trainer: Callable[[str], Trainer]) -> None:
    options = {"tp": 2, "sp": True, "dropout": 0.1, "steps": 4}
    first, second = (trainer("0.19.2").core("device", 2, options) for _ in range(2))
    assert first.history() == second.history()
    assert "RNG state changed" not in first.log()
    without = trainer("0.19.2").core("device", 2, {**options, "dropout": 0.0})
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
