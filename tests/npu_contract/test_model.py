"""A whole model against its golden list, on fake tensors and through the wheel's C++; a loss or change is noticed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.npu_contract import model_run
from tests.npu_contract.environment import Environment
from tests.npu_contract.model_run import CONFIGURATIONS, differences, faults, golden, job

NORM, ATTENTION = "npu_rms_norm", "npu_fusion_attention"
BACKWARD = {NORM: "npu_rms_norm_backward", ATTENTION: "npu_fusion_attention_grad"}

# Runs that differ from a golden list on purpose.
MUTATED: dict[str, dict[str, Any]] = {
    "no attention": job("plain", features=["use_fused_rmsnorm"]),
    "no norm": job("plain", features=["use_flash_attn"]),
    "attention on the reference": job("plain", reference=["attention"]),
    "norm on the reference": job("plain", reference=["rms_norm"]),
    "another epsilon": {**job("plain"), "options": {"config": {"layernorm_epsilon": 1e-3}}},
    "heads not divided": {**job("tensor_parallel"), "options": {**CONFIGURATIONS["tensor_parallel"], "tp": 1}},
}


@pytest.fixture(scope="module")
def results(environment: Environment) -> dict[str, dict[str, Any]]:
    """Every configuration and every mutated run, by name; one process."""
    named = {name: job(name) for name in CONFIGURATIONS} | MUTATED
    return dict(zip(named, model_run.run(environment, list(named.values())), strict=True))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_sequence_is_the_stored_one(results: dict[str, dict[str, Any]], name: str) -> None:
    found = differences(golden(name), results[name])
    wanted = "if this is wanted: python -m tests.npu_contract.model_run --update"
    assert not found, f"{name} ({wanted})\n" + "\n".join(found)
    assert results[name]["applied"] == golden(name)["applied"]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_nothing_runs_unfused_and_every_parameter_has_its_gradient(
    results: dict[str, dict[str, Any]], name: str
) -> None:
    assert faults(results[name]) == []


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_counts_are_those_of_the_model(results: dict[str, dict[str, Any]], name: str) -> None:
    """From the configuration, not from a stored list: two layers, two norms in each and one at the end."""
    layers, options = 2, CONFIGURATIONS[name]
    norms = layers * (4 if options.get("qk_layernorm") else 2) + 1
    again = "recompute_granularity" in options.get("config", {})
    forward, backward = ([text.partition("(")[0] for text in results[name][part]] for part in ("forward", "backward"))
    for operator, count, in_layers in ((NORM, norms, norms - 1), (ATTENTION, layers, layers)):
        assert forward.count(operator) == count
        assert backward.count(BACKWARD[operator]) == count
        assert backward.count(operator) == (in_layers if again else 0)
    heads = model_run.HEADS // options.get("tp", 1)
    calls = [text for text in results[name]["forward"] if text.startswith(ATTENTION)]
    assert all(f"head_num={heads}," in text for text in calls)


@pytest.fixture(scope="module")
def on_host(environment: Environment) -> dict[str, dict[str, Any]]:
    """Every configuration on tensors of the stub device."""
    results = model_run.run(environment, [job(name) for name in CONFIGURATIONS], "host")
    return {result["name"]: result for result in results}


# What a fake kernel cannot know of attention's dropout: seed, offset, and the size of the mask it would draw.
_DRAWN = re.compile(r", (seed|offset|numels)=\d+|(?<=bfloat16\[0\])(, \d+){3}")


@pytest.mark.parametrize("name", CONFIGURATIONS)
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
        if BACKWARD[ATTENTION] in text
    ]
    forward, backward = ([found.groups() if found else None for found in each] for each in (drawn, repeated))
    assert None not in forward and forward == backward[::-1] and len(set(forward)) == 2
    model_parallel_seed = 1 + 2718
    assert {found[0] for found in forward if found} == {str(model_parallel_seed)}


@pytest.mark.parametrize("operator", [NORM, ATTENTION])
@pytest.mark.parametrize("how", ["no {}", "{} on the reference"])
def test_a_lost_operator_is_named(results: dict[str, dict[str, Any]], operator: str, how: str) -> None:
    short = {NORM: "norm", ATTENTION: "attention"}[operator]
    result = results[how.format(short)]
    found = differences(golden("plain"), result)
    lost = [text for text in found if f": lost: {operator}(" in text or f": lost: {BACKWARD[operator]}(" in text]
    assert len(lost) == len(found) == 2 * (5 if operator == NORM else 2), "\n".join(found)
    ours = {NORM: "rms_norm", ATTENTION: "attention"}[operator]
    said = faults(result)
    assert any(text.startswith(f"in place of {ours} ran aten::") for text in said), said
    assert (f"{ours} ran on the reference" in said) == ("reference" in how)


def test_a_changed_argument_is_named(results: dict[str, dict[str, Any]]) -> None:
    found = differences(golden("plain"), results["another epsilon"])
    assert len(found) == 5 and all(": changed: npu_rms_norm(" in text and "epsilon=0.001" in text for text in found), (
        found
    )


def test_heads_that_are_not_divided_are_named(results: dict[str, dict[str, Any]]) -> None:
    found = differences(golden("tensor_parallel"), results["heads not divided"])
    assert any("changed: npu_fusion_attention(" in text and "head_num=4" in text for text in found), found


def test_every_list_has_its_configuration() -> None:
    assert {path.stem for path in model_run.GOLDEN.glob("*.json")} == set(CONFIGURATIONS)


def test_differences_are_told_apart() -> None:
    stored = {"forward": ["a(x=1)", "b(x=1)", "c(x=1)"], "backward": ["d()"]}

    def against(*forward: str) -> list[str]:
        return differences(stored, {"forward": list(forward), "backward": ["d()"]})

    assert against(*stored["forward"]) == []
    assert against("a(x=1)", "c(x=1)") == ["forward 2: lost: b(x=1)"]
    assert against("a(x=1)", "b(x=1)", "e()", "c(x=1)") == ["forward 3: added: e()"]
    assert against("a(x=1)", "b(x=2)", "c(x=1)") == ["forward 2: changed: b(x=1)\n    is now b(x=2)"]
    # Nothing but what is missing is named, however alike the rest is.
    layers = {"forward": ["n()", "a()", "n()", "n()", "a()", "n()", "n()"], "backward": []}
    without = {"forward": ["n()"] * 5, "backward": []}
    assert differences(layers, without) == ["forward 2: lost: a()", "forward 5: lost: a()"]
    assert differences(without, layers) == ["forward 2: added: a()", "forward 5: added: a()"]
    swapped = against("b(x=1)", "a(x=1)", "c(x=1)")
    assert {text.partition(": ")[2].partition(":")[0] for text in swapped} == {"lost", "added"}
    assert differences(stored, {"forward": stored["forward"], "backward": []}) == ["backward 1: lost: d()"]
