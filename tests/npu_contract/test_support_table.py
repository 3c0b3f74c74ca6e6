"""The support table: read rightly from wheels and from our source, and current in docs/npu.md."""

from __future__ import annotations

import json

from tests.npu_contract import support_table
from tests.npu_contract.call_sites import Call, our_calls
from tests.npu_contract.environment import Environment
from tests.npu_contract.support_table import verdict
from tests.npu_contract.wheels import arguments, read

SCHEMA = 'npu_thing(Tensor x, int[2] size=[1, 1], *, str how="a", Tensor(a!)? out=None) -> (Tensor, Tensor)'


def test_the_page_is_current() -> None:
    assert support_table.main(["--check"]) == 0


def test_our_calls_are_found_with_their_names() -> None:
    found = our_calls()
    assert set(found) >= {"npu_fusion_attention", "npu_rms_norm"}
    assert found["npu_rms_norm"].keywords == {"epsilon"} and found["npu_rms_norm"].positional == 2
    # Some of these stand in dictionaries that the call takes as **rest.
    named = {"head_num", "input_layout", "scale", "atten_mask", "sparse_mode", "pre_tockens", "next_tockens"}
    assert found["npu_fusion_attention"].keywords >= named


def test_verdicts() -> None:
    operators = {"npu_thing": {"schema": SCHEMA, "autograd": True, "fake": True}}
    assert verdict(Call("npu_thing", 1, {"how", "size"}), operators) == "yes"
    assert verdict(Call("npu_thing", 1, {"why"}), operators) == "no argument `why`"
    assert "takes 2 arguments by position, we pass 3" in verdict(Call("npu_thing", 3), operators)
    assert verdict(Call("npu_gone", 1), operators) == "absent"
    operators["npu_thing"] |= {"autograd": False, "fake": False}
    assert verdict(Call("npu_thing", 1), operators) == "no autograd formula; no fake kernel"


ASK = """
import json, sys, torch

def has(name, key):
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{name}", key)

print(json.dumps({
    name: {
        "names": [each.name for each in getattr(torch.ops.npu, name).default._schema.arguments],
        "autograd": has(name, "AutogradPrivateUse1"),
        "fake": has(name, "Meta"),
    }
    for name in sys.argv[1:]
}))
"""


# Their kernel for autograd says that there is no derivative.
REGISTERED_TO_REFUSE = {"npu_moe_gating_top_k_softmax"}


def test_the_reader_agrees_with_the_dispatcher(environment: Environment) -> None:
    """For the installed wheel there are two ways to know: its files read as data, and torch's own registry."""
    operators = sorted(our_calls())
    done = environment.run(ASK, "fake", *operators)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    in_files = read(environment.site)["operators"]
    for name in operators:
        found = in_files[name]
        positional, keyword_only = arguments(found["schema"])
        assert told[name] == {
            "names": positional + keyword_only,
            "autograd": found["autograd"] or name in REGISTERED_TO_REFUSE,
            "fake": found["fake"],
        }, name
