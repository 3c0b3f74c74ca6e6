"""Trainings with `--transformer-impl transformer_engine` on the stand-in: as without it, and every feature off and on.

`TRAINED` holds the features that train with Transformer Engine's layers. The others refuse, with what it does itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_lite import runtime
from mindspeed_lite.engine import Context, Settings
from tests.harness import checkouts, feature_layouts, matrix, on_and_off
from tests.harness.rows import options_of, ranks_of
from tests.harness.training import Trainer, fault
from tests.te_contract.table import OWN, SCRIPTS, own_reasons

NEWEST = checkouts.ALL[-1]
WITH = {"transformer_engine": True}
# The layout of a training with the stand-in: what it has more than that with Megatron's local layers.
LAYERS = {
    "fp32": "",
    "fp32 bias layernorm gqa": "",
    "fp32 experts4 first_dense dist": "",
    "fp32 experts4 router_fp32 by_name ep2": "moe_fused grouped",
    "fp32 experts4 router_fp32 tp2 sp ep2 etp1": "moe_fused",
    "fp32 tp2": "",
    "fp32 tp2 sp": "",
    "fp32 pp2": "",
    "fp32 full": "",
    "fp32 layers4 by_name": "cp2",
}
QUICK_LAYERS = ["fp32 experts4 router_fp32 by_name ep2", "fp32 layers4 by_name"]
# Another layout than without Transformer Engine: a dense layer has its norms in linear layers.
LAYOUTS = {"recompute_norm": "experts"}
QUICK = [(NEWEST, "plain"), (NEWEST, "experts")]


def options(words: str) -> dict[str, Any]:
    found = options_of(words.replace("grouped", ""))
    if "grouped" in words:
        found["moe"]["moe_grouped_gemm"] = True
    return found


@pytest.mark.parametrize(
    ("release", "layout"),
    matrix.only(
        [(NEWEST, layout) for layout in QUICK_LAYERS],
        [(release, layout) for release in checkouts.ALL for layout in LAYERS],
    ),
)
def test_losses_are_those_of_the_local_implementation(
    te_trainer: Callable[[str], Trainer], release: str, layout: str
) -> None:
    trainer, given, more = te_trainer(release), options(layout), options(f"{layout} {LAYERS[layout]}")
    local = trainer.core("device", ranks_of(given), {**given, "steps": 4})
    theirs = trainer.core("device", ranks_of(more), {**more, **WITH, "steps": 4})
    assert fault(local.steps(), theirs.steps(), drift=2e-5, first_norm=2e-5, norm=2e-3) == ""


@pytest.mark.parametrize(
    ("release", "layout"),
    matrix.only(QUICK, [(release, layout) for release in checkouts.ALL for layout in feature_layouts.LAYOUTS]),
)
def test_features_train_within_their_class(te_trainer: Callable[[str], Trainer], release: str, layout: str) -> None:
    features = [
        name
        for own, names in on_and_off.layouts(release).items()
        for name in names
        if LAYOUTS.get(name, own) == layout and not own_reasons(runtime.catalogue()[name], layout)
    ]
    faults = {
        name: found
        for name in features
        if (
            found := on_and_off.train(te_trainer(release), layout, name, options=WITH).fault(
                on_and_off.numerics_of(runtime.catalogue()[name])
            )
        )
    }
    assert faults == {}
    assert features or layout not in ("plain", "experts")


@pytest.mark.parametrize(
    ("release", "layout"),
    matrix.only([], [(release, layout) for release in checkouts.ALL for layout in feature_layouts.LAYOUTS]),
)
def test_the_package_alone_changes_nothing(te_trainer: Callable[[str], Trainer], release: str, layout: str) -> None:
    """Every feature trains on local layers with the package installed; so does one whose optimizer is its FusedAdam."""
    catalogue, trainer = runtime.catalogue(), te_trainer(release)
    faults = {
        name: found
        for name in on_and_off.layouts(release).get(layout, [])
        if (found := on_and_off.train(trainer, layout, name).fault(on_and_off.numerics_of(catalogue[name])))
    }
    assert faults == {}


def test_what_is_not_trained_names_what_transformer_engine_has() -> None:
    """All features are trained, or named here; a reason that is lost or new is seen."""
    refused = {
        feature.name
        for feature in runtime.catalogue()
        if all(own_reasons(feature, layout) for layout in feature_layouts.LAYOUTS)
    }
    assert refused == OWN
    trained = {name for names in on_and_off.layouts(NEWEST).values() for name in names}
    assert {feature.name for feature in runtime.catalogue()} - trained == SCRIPTS


@pytest.mark.parametrize("installed", [False, True])
def test_auto_leaves_an_optimizer_that_is_fused(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    from mindspeed_lite.patches import use_fused_adamw

    monkeypatch.setattr(use_fused_adamw, "fused_adam", lambda device: "Transformer Engine" if installed else "")
    args = SimpleNamespace(**feature_layouts.host_args("plain"))
    unasked = Context(Settings.of(runtime.catalogue().options(), {}), "cuda", {}, args)
    asked = dataclasses.replace(unasked, settings=Settings({**unasked.settings, "reuse_fp32_param": True}))
    condition = use_fused_adamw.FEATURE.condition
    assert condition is not None and condition(asked) == []
    assert condition(unasked) == (
        ["Transformer Engine's fused Adam is used: --use-fused-adamw replaces its step"] if installed else []
    )
