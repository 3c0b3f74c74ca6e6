"""Which features a run of an arm turns on in the parsed arguments."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_lite import runtime
from mindspeed_lite.bench import worker
from mindspeed_lite.bench.plan import Arm, Job, RunPlan


@pytest.mark.parametrize("beside", [(), ("use_fused_rmsnorm", "use_fused_swiglu")])
@pytest.mark.parametrize(
    ("arm", "chosen"),
    [
        (Arm("off", "off"), set()),
        (Arm("x", "only", ("moe_grouped_gemm",)), {"moe_grouped_gemm"}),
        (Arm("as given", "given"), {"use_flash_attn"}),
        (Arm("all", "all"), {"use_flash_attn"}),
    ],
)
def test_features_of_an_arm(arm: Arm, chosen: set[str], beside: tuple[str, ...], tmp_path: Path) -> None:
    catalogue = runtime.catalogue()
    args: Any = SimpleNamespace(**{option.dest: option.default for option in catalogue.options()})
    args.use_flash_attn = True
    RunPlan(Job((), tmp_path, 0, 0, 0.0, beside=beside), arm, tmp_path).write(tmp_path / "plan")
    assert worker.choose_features(args, RunPlan.read(str(tmp_path / "plan"))) == ["use_flash_attn"]
    assert {feature.name for feature in catalogue if feature.is_enabled(vars(args))} == {*chosen, *beside}
    assert getattr(args, runtime.AUTO.dest, False) == (arm.choice == "all")
