"""A whole model against its golden list, on fake tensors and through the wheel's C++; a loss or change is noticed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.npu_contract import model_run
from tests.npu_contract.environment import Environment, torch_version
from tests.npu_contract.model_run import CONFIGURATIONS, differences, faults, golden, job

ATTENTION = "npu_fusion_attention"
# Runs that differ from the golden list of `plain` on purpose, what is lost or added then, and the fault that is named.
MUTATED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no rms_norm": (
        job("plain", features=[each for each in golden("plain")["applied"] if each != "use_fused_rmsnorm"]),
        "forward -npu_rms_norm(",
        "in place of rms_norm ran aten::",
    ),
    "rms_norm on the reference": (
        job("plain", reference=["rms_norm"]),
        "backward -npu_rms_norm_backward(",
        "rms_norm ran on the reference",
    ),
    "another epsilon": ({**job("plain"), "options": {"config": {"layernorm_epsilon": 1e-3}}}, "epsilon=0.001", ""),
}


def needs_torch(release: tuple[int, int], why: str) -> None:
    """The calls of operators are proven on every wheel there is; of whole models only what runs there."""
    if tuple(map(int, torch_version().split(".")[:2])) < release:
        pytest.skip(f"needs torch {release[0]}.{release[1]}: {why}")


# Mode host computes no value, and the experts' counts are read on the host.
WITH_VALUES = [name for name in CONFIGURATIONS if name != "experts"]


@pytest.fixture(scope="module")
def results(environment: Environment) -> dict[str, dict[str, Any]]:
    """Every configuration and every mutated run, by name; one process."""
    needs_torch((2, 11), "before it fake tensors cannot be all-reduced")
    named = {name: job(name) for name in CONFIGURATIONS} | {name: row[0] for name, row in MUTATED.items()}
    return dict(zip(named, model_run.run(environment, list(named.values())), strict=True))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_sequence_is_the_stored_one(results: dict[str, dict[str, Any]], name: str) -> None:
    found = differences(golden(name), results[name])
    wanted = "if this is wanted: python -m tests.npu_contract.model_run --update"
    assert not found, f"{name} ({wanted})\n" + "\n".join(found)
    # A feature that is newer than the list, and changes none of these calls, is no news.
    assert set(golden(name)["applied"]) <= set(results[name]["applied"])


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_nothing_runs_unfused_and_every_parameter_has_its_gradient(
    results: dict[str, dict[str, Any]], name: str
) -> None:
    assert faults(results[name]) == []


@pytest.fixture(scope="module")
def on_host(environment: Environment) -> dict[str, dict[str, Any]]:
    """Every configuration on tensors of the stub device."""
    needs_torch((2, 10), "torch_npu's index_put before it asks CANN for what the stubs lack")
    results = model_run.run(environment, [job(name) for name in WITH_VALUES], "host")
    return {result["name"]: result for result in results}


# What a fake kernel cannot know of attention's dropout: seed, offset, and the size of the mask it would draw.
_DRAWN = re.compile(r", (seed|offset|numels)=\d+|(?<=bfloat16\[0\])(, \d+){3}")


@pytest.mark.parametrize("name", WITH_VALUES)
def test_the_code_of_the_wheel_takes_the_same_calls(on_host: dict[str, dict[str, Any]], name: str) -> None:
    assert faults(on_host[name]) == []
    stored, seen = (
        {part: [_DRAWN.sub("", text) for text in calls[part]] for part in ("forward", "backward")}
        for calls in (golden(name), on_host[name])
    )
    assert differences(stored, seen) == []


def test_the_backward_drops_what_the_forward_dropped(on_host: dict[str, dict[str, Any]]) -> None:
    """Each layer's dropout has the seed of Megatron's model-parallel stream and an offset of its own."""
    result = on_host["dropout"]
    drawn = [re.search(r"bfloat16\[0\], (\d+), (\d+), (\d+)", text) for text in result["forward"] if ATTENTION in text]
    repeated = [
        re.search(r"seed=(\d+), offset=(\d+), numels=(\d+)", text)
        for text in result["backward"]
        if f"{ATTENTION}_grad" in text
    ]
    forward, backward = ([found.groups() if found else None for found in each] for each in (drawn, repeated))
    assert None not in forward and forward == backward[::-1] and len(set(forward)) == 2
    model_parallel_seed = 1 + 2718
    assert {found[0] for found in forward if found} == {str(model_parallel_seed)}


@pytest.mark.parametrize("name", MUTATED)
def test_a_model_that_differs_is_noticed(results: dict[str, dict[str, Any]], name: str) -> None:
    _, difference, fault = MUTATED[name]
    found, said = differences(golden("plain"), results[name]), faults(results[name])
    assert any(difference in text for text in found), found
    assert any(fault in text for text in said) if fault else said == []


def test_every_list_has_its_configuration() -> None:
    assert {path.stem for path in model_run.GOLDEN.glob("*.json")} == set(CONFIGURATIONS)
