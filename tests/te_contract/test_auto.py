"""What `--mindspeed-lite-auto` takes on CUDA: with Transformer Engine's layers, with the package alone, without."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from mindspeed_lite import runtime
from mindspeed_lite.engine import Context, Plan, Settings, make_plan
from mindspeed_lite.patches import use_fused_adamw
from mindspeed_lite.platform import megatron
from tests.harness import feature_layouts
from tests.harness.checkouts import ROOT
from tests.harness.processes import forked

ENGINE = "Transformer Engine"
GUIDE = ROOT / "docs" / "guides" / "from-transformer-engine.md"
# By layout; in the guide each has the reason why it is not slower.
TAKEN = {
    "plain": {"gradient_accumulation_fusion", "use_fused_cross_entropy", "use_fused_swiglu"},
    "experts": {"gradient_accumulation_fusion", "param_gather_once", "use_fused_cross_entropy", "use_fused_swiglu"},
    "overlapped": {
        "gradient_accumulation_fusion", "reset_bucket_group_order", "use_fused_cross_entropy", "use_fused_swiglu",
    },
}  # fmt: skip


def chosen(layout: str, implementation: str, package: str) -> Plan:
    use_fused_adamw.fused_adam = lambda device: package  # in this fork
    args = SimpleNamespace(**{**feature_layouts.host_args(layout), "transformer_impl": implementation})
    settings = Settings.of((*runtime.GENERAL, *runtime.catalogue().options()), {"mindspeed_lite_auto": True})
    version = megatron.version()
    assert version is not None
    context = Context(settings, "cuda", {megatron.HOST: version}, args)
    table = runtime.fingerprints()
    return make_plan(runtime.catalogue(), context, host_version=version, fingerprints=table, auto=True)


def names(plan: Plan) -> set[str]:
    return {each.feature.name for each in plan.applied}


@pytest.mark.parametrize("layout", TAKEN)
@forked("megatron")
def test_auto_takes_what_transformer_engine_lacks(layout: str) -> None:
    used, unused, absent = (
        chosen(layout, *setting) for setting in (("transformer_engine", ENGINE), ("local", ENGINE), ("local", ""))
    )
    assert names(used) == TAKEN[layout] and names(used) < names(unused)
    # Whichever layers there are, Megatron takes the package's FusedAdam.
    steps = {each.name for each in runtime.catalogue() if "use_fused_adamw" in (rel.feature for rel in each.requires)}
    assert names(absent) - names(unused) == {"use_fused_adamw"} | (steps & names(absent))
    assert names(unused) < names(absent)
    for name in names(absent) - names(used):
        reasons = used.outcome(name).reasons
        theirs = ("--transformer-impl transformer_engine", f"{ENGINE}'s fused Adam", "requires use_fused_adamw")
        assert reasons and all(each.startswith(theirs) for each in reasons), (name, reasons)


def test_the_guide_has_a_reason_for_each() -> None:
    section = GUIDE.read_text().partition("## With --mindspeed-lite-auto")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| \[(\w+)\]\(\S+\) \| \S+.* \|$", section, re.M)
    assert {*listed} == set().union(*TAKEN.values())
