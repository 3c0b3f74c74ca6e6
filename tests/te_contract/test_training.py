"""Trainings with `--transformer-impl transformer_engine` on the stand-in: as without it, and every feature off and on.

A feature that leaves the work to Transformer Engine refuses, with what that does itself.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from mindspeed_lite import runtime
from tests.harness import checkouts, feature_layouts, matrix, on_and_off, rows
from tests.harness.rows import DRIFT, WGRAD, Rows, check, options_of, ranks_of
from tests.harness.training import Trainer, fault
from tests.te_contract import saved_bytes
from tests.te_contract.conftest import DELAYED
from tests.te_contract.table import NPU, SCRIPTS, own_reasons

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
QUICK = [(NEWEST, "plain"), ("0.16.1", "experts")]
V = "schedules_method=dualpipev dualpipev_dw_detach"
V_MODEL = "te by_name wgrad layers4 micro5"


# Features of layers that `feature_layouts` does not have: Megatron's grouped experts, and weight gradients apart.
ROWS = [
    Rows("released and delayed", {"pp2 experts4 grouped": NEWEST, "pp2 ep2 experts4 grouped shared permute_fused": ""},
         "moe_zero_memory=level1 pipeline_schedule=zb-auto", both=f"{WGRAD} moe_grouped_gemm",
         base="te micro5 wgrad bits undone", steps=2),
    Rows("delayed", {"pp2 bias": "", "pp2 tp2 sp": "", "pp2 dp2 overlap_grad no_sync": "", "pp2 full": ""},
         "pipeline_schedule=zb-auto", both=WGRAD, base="te micro5 wgrad bits undone", steps=2),
    Rows("recomputed experts", {"experts4": NEWEST}, "recompute_activation_function recompute_norm",
         base="te bits undone", steps=2),
    Rows("V", {"": ""}, V, both=WGRAD, base=f"{V_MODEL} pp2 vpp2", reference=V_MODEL, near=DRIFT, rank=0,
         before="tests.te_contract.conftest:log_delayed", seen=DELAYED),
    Rows("pairs in a V", {"": ""}, "moe_fb_overlap", both=f"{WGRAD} {V} delay_wgrad_compute", rank=0, steps=2,
         base=f"{V_MODEL} pp2 vpp2 ep2 experts4 grouped bits", more="combined delayed"),
    Rows("on a side stream", {"ep2 experts4 grouped": "", "ep2 experts4 grouped overlap_grad dist no_sync": ""},
         "moe_wgrad_side_stream=always", both=f"{WGRAD} moe_grouped_gemm", base="te wgrad bits undone", steps=2,
         before="moe_wgrad_side_stream", seen=("a gradient came from the side",)),
]  # fmt: skip
GROUPED = {"moe_zero_memory", "moe_wgrad_side_stream"}


@functools.cache
def trained(release: str) -> dict[str, list[str]]:
    """By layout, the features of a release."""
    return on_and_off.layouts(checkouts.version(release))


def features_of(release: str, layout: str) -> list[str]:
    """Features that train with Transformer Engine in a layout of `feature_layouts`."""
    return [
        name
        for own, names in trained(release).items()
        for name in names
        if name not in GROUPED and LAYOUTS.get(name, own) == layout and not own_reasons(name, layout)
    ]


def with_features(layouts: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of release and layout in which a feature trains."""
    return [(release, layout) for release in checkouts.TO_MAIN for layout in layouts if features_of(release, layout)]


@pytest.mark.parametrize(
    ("release", "layout"),
    matrix.only(
        [(NEWEST, layout) for layout in QUICK_LAYERS],
        [(release, layout) for release in checkouts.TO_MAIN for layout in LAYERS],
    ),
)
def test_losses_are_those_of_the_local_implementation(
    te_trainer: Callable[[str], Trainer], release: str, layout: str
) -> None:
    trainer, given, more = te_trainer(release), options_of(layout), options_of(f"{layout} {LAYERS[layout]}")
    local = trainer.core("device", ranks_of(given), {**given, "steps": 4})
    theirs = trainer.core("device", ranks_of(more), {**more, **WITH, "steps": 4})
    assert fault(local.steps(), theirs.steps(), drift=2e-5, first_norm=2e-5, norm=2e-3) == ""


@pytest.mark.parametrize(
    ("release", "layout"),
    matrix.only(QUICK, with_features(feature_layouts.LAYOUTS)),
)
def test_features_train_within_their_class(te_trainer: Callable[[str], Trainer], release: str, layout: str) -> None:
    """Three steps with a feature, and two more after `disable`; Megatron's schedule cannot train a V."""
    options = {**WITH, "undone": layout != "V"}
    faults = {
        name: found
        for name in features_of(release, layout)
        if (
            found := on_and_off.train(te_trainer(release), layout, name, steps=3, strict=True, options=options).fault(
                on_and_off.numerics_of(runtime.catalogue()[name])
            )
        )
    }
    assert faults == {}


@pytest.mark.parametrize(
    ("release", "rows", "layout"),
    rows.parameters([dataclasses.replace(each, releases=checkouts.TO_MAIN) for each in ROWS]),
)
def test_gradients_and_rows_of_its_layers(
    te_trainer: Callable[[str], Trainer], release: str, rows: Rows, layout: str, tmp_path: Path
) -> None:
    check(te_trainer(release), rows, layout, tmp_path)


@pytest.mark.parametrize(
    ("release", "layout"),
    matrix.only([], [(each, layout) for each in checkouts.TO_MAIN for layout in trained(each)]),
)
def test_the_package_alone_changes_nothing(te_trainer: Callable[[str], Trainer], release: str, layout: str) -> None:
    """Every feature trains on local layers with the package installed; so does one whose optimizer is its FusedAdam."""
    catalogue, trainer = runtime.catalogue(), te_trainer(release)
    faults = {
        name: found
        for name in trained(release)[layout]
        if (found := on_and_off.train(trainer, layout, name).fault(on_and_off.numerics_of(catalogue[name])))
    }
    assert faults == {}


def test_bytes_saved_are_those_counted_by_hand(te_trainer: Callable[[str], Trainer]) -> None:
    done = te_trainer(NEWEST).run(entry="script", arm="adaptor", argv=[saved_bytes.__file__]).check()
    (line,) = (each for each in done.log().splitlines() if each.startswith("{"))
    assert json.loads(line) == saved_bytes.EXPECTED


def test_features_are_trained_but_those_that_transformer_engine_has() -> None:
    """The guide, which `docs/generate.py --check` compares, has their names and reasons."""
    catalogue = runtime.catalogue()
    own = [each.name for each in catalogue if all(own_reasons(each.name, layout) for layout in feature_layouts.LAYOUTS)]
    assert len(own) == 14
    found = {name for names in trained(NEWEST).values() for name in names}
    assert {feature.name for feature in catalogue} - found == SCRIPTS | NPU
