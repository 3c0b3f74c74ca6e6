"""The test of the tests: a call site broken on purpose fails the checks, and for the right reason."""

from __future__ import annotations

from typing import Any

import pytest

from tests.npu_contract.cases import CASES
from tests.npu_contract.checks import problems
from tests.npu_contract.mutations import MUTATIONS, Mutation
from tests.npu_contract.recorder import Tensor


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_call_site_is_noticed(mutated: dict[str, list[str]], name: str) -> None:
    found = mutated[name]
    assert found, f"{name}: nothing was noticed"
    assert any(MUTATIONS[name].noticed in problem for problem in found), "\n".join(sorted(set(found))[:20])


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_still_has_its_call_site(name: str) -> None:
    compile(MUTATIONS[name].source(), name, "exec")


CHANGED = {
    "statistic of another shape": ("groups", "backward", {"softmax_max": Tensor("float32", (2, 24, 4, 8), "npu")}),
    "statistic in half precision": ("groups", "backward", {"softmax_sum": Tensor("bfloat16", (2, 4, 24, 8), "npu")}),
    "statistic of another call": ("3 dimensions", "backward", {"rstd": Tensor("float32", (6, 1), "npu")}),
    "another scale in the backward": ("groups", "backward", {"scale_value": 1.0}),
    "another mode in the backward": ("causal", "backward", {"sparse_mode": 3}),
    "other dropped scores in the backward": ("dropout", "backward", {"seed": 7}),
    "gradient through a wider weight": ("3 dimensions", "backward", {"gamma": Tensor("float32", (64,), "npu")}),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_call_that_is_changed_on_its_way_is_noticed(on_npu: dict[str, Any], name: str) -> None:
    """Nobody writes these backward calls by hand yet; the operators that will are to be held to the same."""
    case, part, change = CHANGED[name]
    record = on_npu["cases"]["fake"][case]
    changed = {**record, part: [call.changed(**change) for call in record[part]]}
    assert problems(CASES[case], record) == []
    assert any(next(iter(change)) in problem for problem in problems(CASES[case], changed))


@pytest.mark.parametrize("lost", ["forward", "backward", "gradients"])
def test_what_is_lost_is_noticed(on_npu: dict[str, Any], lost: str) -> None:
    record = on_npu["cases"]["fake"]["groups"]
    empty: Any = {"q": None, "k": None, "v": None} if lost == "gradients" else []
    assert problems(CASES["groups"], {**record, lost: empty})


def test_a_mutation_of_a_call_site_that_is_gone_is_an_error() -> None:
    with pytest.raises(ValueError, match="change the mutation"):
        Mutation("rms_norm", "no such text", "", "").source()
