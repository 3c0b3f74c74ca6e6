"""The test of the tests: a call site broken on purpose fails the checks, and for the right reason."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import matrix
from tests.npu_contract.checks import problems
from tests.npu_contract.definitions import Mutation
from tests.npu_contract.operators import CASES, MUTATIONS
from tests.npu_contract.recorder import Tensor


@matrix.whole
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_call_site_is_noticed(mutated: dict[str, list[str]], name: str) -> None:
    found = mutated[name]
    assert found, f"{name}: nothing was noticed"
    assert any(MUTATIONS[name].noticed in problem for problem in found), "\n".join(sorted(set(found))[:20])


@matrix.whole
def test_only_what_is_changed_is_noticed(mutated: dict[str, list[str]]) -> None:
    """The same way of executing a call site, without a change, finds nothing."""
    unchanged = {name: found for name, found in mutated.items() if name.endswith("/unchanged")}
    assert set(unchanged) == {f"{name.partition('/')[0]}/unchanged" for name in MUTATIONS}
    assert not any(unchanged.values()), unchanged


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_still_has_its_call_site(name: str) -> None:
    compile(MUTATIONS[name].source(name.partition("/")[0]), name, "exec")


NORM = "rms_norm/3 dimensions"
GROUPS = "attention/groups"
CHANGED = {
    "statistic of another shape": (GROUPS, {"softmax_max": Tensor("float32", (2, 24, 4, 8), "npu")}),
    "statistic in half precision": (GROUPS, {"softmax_sum": Tensor("bfloat16", (2, 4, 24, 8), "npu")}),
    "statistic of another call": (NORM, {"rstd": Tensor("float32", (6, 1), "npu")}),
    "another scale in the backward": (GROUPS, {"scale_value": 1.0}),
    "another mode in the backward": ("attention/causal", {"sparse_mode": 3}),
    "other dropped scores in the backward": ("attention/dropout", {"seed": 7}),
    "gradient through a wider weight": (NORM, {"gamma": Tensor("float32", (64,), "npu")}),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_call_that_is_changed_on_its_way_is_noticed(on_npu: dict[str, Any], name: str) -> None:
    """Nobody writes these backward calls by hand yet; the operators that will are to be held to the same."""
    case, change = CHANGED[name]
    record = on_npu["cases"]["fake"][case]
    changed = {**record, "backward": [call.changed(**change) for call in record["backward"]]}
    assert problems(CASES[case], record) == []
    assert any(next(iter(change)) in problem for problem in problems(CASES[case], changed))


@pytest.mark.parametrize("lost", ["forward", "backward", "gradients"])
def test_what_is_lost_is_noticed(on_npu: dict[str, Any], lost: str) -> None:
    record = on_npu["cases"]["fake"]["attention/groups"]
    empty: Any = {"q": None, "k": None, "v": None} if lost == "gradients" else []
    assert problems(CASES["attention/groups"], {**record, lost: empty})


def test_a_mutation_of_a_call_site_that_is_gone_is_an_error() -> None:
    with pytest.raises(ValueError, match="change the mutation"):
        Mutation("no such text", "", "").source("rms_norm")
