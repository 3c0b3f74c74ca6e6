"""A whole model against its golden list, on fake tensors and through the wheel's C++; a loss or change is noticed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from mindspeed_lite.runtime import catalogue
from tests.npu_contract import model_run
from tests.npu_contract.environment import Environment, torch_version
from tests.npu_contract.model_run import CONFIGURATIONS, LAYERS, differences, faults, golden, job
from tests.npu_contract.operators import CASES, IN_MODEL

NORM, ATTENTION = "npu_rms_norm", "npu_fusion_attention"
# Operator of ours -> that of torch_npu and that of its gradient.
# An operator's first case is the call that models make.
NAMES = {case.operator: (case.forward, case.backward) for case in reversed(CASES.values())}


def count(operator: str, options: Mapping[str, Any]) -> int:
    """How often the operator runs in one forward of a model."""
    in_layer, outside = IN_MODEL[operator](options)
    return LAYERS * in_layer + outside


# Operator -> the first configuration that has it.
HOME = {
    operator: next(name for name in CONFIGURATIONS if count(operator, CONFIGURATIONS[name])) for operator in IN_MODEL
}
# Without our softmax Megatron's fusion would call its extension, and its default is switched off.
NOT_FUSED = {"masked_softmax": {**CONFIGURATIONS[HOME["masked_softmax"]], "config": {"masked_softmax_fusion": False}}}


def without(operator: str) -> dict[str, Any]:
    """The run of an operator's configuration with the features that do without it."""
    users = {feature.name for feature in catalogue() if operator in feature.operators}
    name = HOME[operator]
    run = job(name, features=[feature for feature in golden(name)["applied"] if feature not in users])
    return {**run, "options": NOT_FUSED.get(operator, run["options"])}


# Runs that differ from a golden list on purpose.
MUTATED: dict[str, dict[str, Any]] = {
    **{f"no {operator}": without(operator) for operator in IN_MODEL},
    **{f"{operator} on the reference": job(HOME[operator], reference=[operator]) for operator in IN_MODEL},
    "another epsilon": {**job("plain"), "options": {"config": {"layernorm_epsilon": 1e-3}}},
    "heads not divided": {**job("tensor_parallel"), "options": {**CONFIGURATIONS["tensor_parallel"], "tp": 1}},
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
    named = {name: job(name) for name in CONFIGURATIONS} | MUTATED
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


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_counts_are_those_of_the_model(results: dict[str, dict[str, Any]], name: str) -> None:
    """From the configuration, not from a stored list."""
    options = CONFIGURATIONS[name]
    again = "recompute_granularity" in options.get("config", {})
    forward, backward = ([text.partition("(")[0] for text in results[name][part]] for part in ("forward", "backward"))
    for operator in IN_MODEL:
        own, gradient = NAMES[operator]
        wanted = count(operator, options)
        assert forward.count(own) == wanted
        recomputed = LAYERS * IN_MODEL[operator](options)[0] if again else 0
        # An operator may be its own gradient.
        assert backward.count(gradient) == wanted + (recomputed if own == gradient else 0)
        assert backward.count(own) == recomputed + (wanted if own == gradient else 0)
    heads = model_run.HEADS // options.get("tp", 1)
    calls = [text for text in results[name]["forward"] if text.startswith(ATTENTION)]
    assert all(f"head_num={heads}," in text for text in calls)


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
        if NAMES["attention"][1] in text
    ]
    forward, backward = ([found.groups() if found else None for found in each] for each in (drawn, repeated))
    assert None not in forward and forward == backward[::-1] and len(set(forward)) == 2
    model_parallel_seed = 1 + 2718
    assert {found[0] for found in forward if found} == {str(model_parallel_seed)}


@pytest.mark.parametrize("operator", IN_MODEL)
@pytest.mark.parametrize("how", ["no {}", "{} on the reference"])
def test_a_lost_operator_is_named(results: dict[str, dict[str, Any]], operator: str, how: str) -> None:
    result = results[how.format(operator)]
    found = [text for text in differences(golden(HOME[operator]), result) if ": lost: " in text]
    own, gradient = NAMES[operator]
    lost = [text for text in found if f": lost: {own}(" in text or f": lost: {gradient}(" in text]
    assert len(lost) == len(found) == 2 * count(operator, CONFIGURATIONS[HOME[operator]]), "\n".join(found)
    said = faults(result)
    assert any(text.startswith(f"in place of {operator} ran aten::") for text in said), said
    assert (f"{operator} ran on the reference" in said) == ("reference" in how)


def test_a_changed_argument_is_named(results: dict[str, dict[str, Any]]) -> None:
    found = differences(golden("plain"), results["another epsilon"])
    assert len(found) == 5 and all(": changed: npu_rms_norm(" in text and "epsilon=0.001" in text for text in found), (
        found
    )


def test_heads_that_are_not_divided_are_named(results: dict[str, dict[str, Any]]) -> None:
    found = differences(golden("tensor_parallel"), results["heads not divided"])
    assert any("changed: npu_fusion_attention(" in text and "head_num=4" in text for text in found), found


def test_each_kind_of_fault_is_named() -> None:
    kinds = ("on_reference", "fallbacks", "violations", "left_off", "wrong_gradients")
    right: dict[str, Any] = {kind: [] for kind in kinds} | {"unfused": {"rms_norm": []}}
    assert faults(right) == []
    for changed, said in (
        ({"on_reference": ["rms_norm"]}, "rms_norm ran on the reference"),
        ({"fallbacks": ["f: why"]}, "fell back: f: why"),
        ({"unfused": {"rms_norm": ["aten::rsqrt"]}}, "in place of rms_norm ran aten::rsqrt"),
        ({"violations": ["broken"]}, "contract: broken"),
        ({"left_off": ["f: why"]}, "auto leaves f: why"),
        ({"wrong_gradients": ["weight: None"]}, "gradient of weight: None"),
    ):
        assert faults({**right, **changed}) == [said]


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
