"""Every feature, off and on, on every release, and on models of which a part is frozen or has adapters (LoRA).

In `make test` one older release a day trains a layout; the newest trains every feature on every kind of frozen model on
one rank, and on one kind a day on two. All by `make test-whole`, all releases by `make matrix`.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from mindspeed_lite import runtime
from tests.harness import checkouts, frozen, matrix, on_and_off
from tests.harness.training import FIRST_NORM, Result, Trainer

NEWEST = checkouts.ALL[-1]
ALONE = [layout for layout, (ranks, *_) in on_and_off.LAYOUTS.items() if ranks == 1]
SAME_DRAWS = [kind for kind in frozen.KINDS if kind != frozen.DRAWING]
TODAYS = SAME_DRAWS[datetime.date.today().toordinal() % len(SAME_DRAWS)]
KINDS = {"whole": ("",), "all": frozen.KINDS, "today's": (TODAYS,)}
# These release what a shared expert keeps; the layout is no other feature's first.
MORE = {"shared experts": ["moe_zero_memory", "recompute_activation_function"]}
ROWS = [
    *((release, layout, "whole") for release in checkouts.EVERY for layout in on_and_off.LAYOUTS),
    *((NEWEST, layout, "today's") for layout in on_and_off.LAYOUTS if layout not in ALONE),
    *((release, layout, "all") for release in checkouts.EVERY for layout in on_and_off.LAYOUTS),
]
QUICK = [
    (checkouts.TODAY, "plain", "whole"),
    *((NEWEST, layout, "all" if layout in ALONE else "today's") for layout in on_and_off.LAYOUTS),
]


@pytest.mark.parametrize(("release", "layout", "kinds"), matrix.only(QUICK, ROWS))
def test_features_train_within_their_class(
    trainer: Callable[[str], Trainer], release: str, layout: str, kinds: str
) -> None:
    features = on_and_off.layouts(release).get(layout, [])
    assert features or layout != "plain"
    features += MORE.get(layout, []) if kinds != "whole" else []
    fits = [kind for kind in KINDS[kinds] if layout in ALONE or kind != frozen.DRAWING]
    rows = {f"{feature}{on_and_off.FROZEN * bool(kind)}{kind}": feature for kind in fits for feature in features}
    found = on_and_off.trained(trainer(release), layout, [*rows]) if rows else {}
    # Gradients that are few or small have more of their rounding in their norm: as large as that of bf16.
    first_norm = FIRST_NORM if kinds == "whole" else 2.0**-8
    faults = {
        row: fault
        for row, each in found.items()
        if (fault := each.fault(on_and_off.numerics_of(runtime.catalogue()[rows[row]]), first_norm))
    }
    assert faults == {}


def test_a_fault_is_seen() -> None:
    """A loss or a gradient norm beyond the class, other bits, a missing step and an error each are one."""
    step = [((1.0).hex(), (1.0).hex())]
    other = [((1.0 + 2.0**-7).hex(), (1.0).hex())]
    assert on_and_off.Outcome(step, step).fault("bitwise") == ""
    assert "not the same bits" in on_and_off.Outcome(step, other).fault("bitwise")
    assert "loss 1.0 off" in on_and_off.Outcome(step, other).fault("ulp")
    for numerics in ("ulp", "deviation"):
        wrong = [*step, ((1.0).hex(), (1.5).hex())]
        assert "step 1: gradient norm 1.0 off" in on_and_off.Outcome([*step, *step], wrong).fault(numerics)
    assert on_and_off.Outcome(step, other).fault("deviation") == ""
    assert on_and_off.Outcome(step, step, idle=["adamw"]).fault("bitwise") == "never called: adamw"
    assert "0 steps with it" in on_and_off.Outcome(step, []).fault("deviation")
    assert on_and_off.Outcome(step, step, error="Traceback\nValueError: x").fault("ulp") == "ValueError: x"


class _Ranks:
    """Ranks that train as `on_and_off` does, as far as `FATAL` lets them, without Megatron."""

    FATAL = ("use_flash_attn", "use_fused_rmsnorm")

    def __init__(self, scratch: Path, begins: bool = True) -> None:
        self.scratch, self.begins = scratch, begins
        self.given: list[list[str]] = []

    def run(self, nproc: int, argv: list[str], **job: object) -> Result:
        _, out, _, _, _, *features = argv
        self.given.append(features)
        ends = next((place for place, name in enumerate(features) if name in self.FATAL), None)
        step = [((1.0).hex(), (1.0).hex())]
        rows = {name: asdict(on_and_off.Outcome(step, step)) for name in features[:ends]}
        for rank in range(nproc if self.begins else 0):
            # The first kills its ranks without a word; of the second one rank 0 is the cause.
            more = {}
            if ends is not None and features[ends] == self.FATAL[1]:
                text = "Connection closed" if rank else "ValueError: x"
                more = {features[ends]: asdict(on_and_off.Outcome(step, error=f"Traceback\n{text}"))}
            path = Path(out, f"{rank}.json")
            path.write_text(json.dumps(rows | more))
            os.utime(path, ns=(rank, rank))
        (self.scratch / "rank0.log").write_text("Traceback\nSegmentation fault")
        return Result([0 if ends is None and self.begins else -11] * nproc, 0.0, self.scratch)


def test_a_feature_that_ends_the_ranks_leaves_the_others_trained(tmp_path: Path) -> None:
    features = ["moe_grouped_gemm", *_Ranks.FATAL, "moe_permute_fusion"]
    ranks = _Ranks(tmp_path)
    found = on_and_off.trained(ranks, "tensor", features)  # type: ignore[arg-type]
    assert {name: each.fault("bitwise") for name, each in found.items()} == {
        "moe_grouped_gemm": "",
        "use_flash_attn": "rank 0 ended with -11: Segmentation fault",
        "use_fused_rmsnorm": "ValueError: x",
        "moe_permute_fusion": "",
    }
    assert ranks.given == [features, features[2:], features[3:]]
    found = on_and_off.trained(_Ranks(tmp_path, begins=False), "tensor", features)  # type: ignore[arg-type]
    assert {each.error for each in found.values()} == {"without it: rank 0 ended with -11: Segmentation fault"}
