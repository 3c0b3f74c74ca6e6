"""`--reuse-fp32-param`: weights that it leaves alone; `_shared/test_optimizer_state.py` has its trainings."""

from __future__ import annotations

from pathlib import Path

import mindspeed_lite
from tests.harness.optimizers import KINDS, start, train
from tests.harness.processes import forked


@forked("megatron")
def test_weights_that_are_no_half_are_left_alone_and_that_is_said(groups: Path) -> None:
    start(groups)
    mindspeed_lite.enable(reuse_fp32_param=True)
    train(KINDS["fp16"], 2)
    said = [each.reason for each in mindspeed_lite.report().fallbacks if each.feature == "reuse_fp32_param"]
    assert said == ["3 main parameters have no bf16 weight to be half of"]
