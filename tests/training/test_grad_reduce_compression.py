"""`--grad-reduce-compression` with each feature of the optimizer and in each layout: bytes, losses, kill and resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_lite import runtime
from mindspeed_lite.engine import Feature
from tests.harness import gradient_bytes, matrix, on_and_off
from tests.harness.feature_layouts import LAYOUTS, flags_of, host_args, why_not
from tests.harness.rows import NEW, options_of, ranks_of
from tests.harness.training import LAYOUTS as SCRIPT_LAYOUTS
from tests.harness.training import MODEL, NO_DROPOUT, SCRIPT, Result, Trainer, fault

NAME = "grad_reduce_compression"
COUNT = "streams tests.harness.gradient_bytes:count"


def _reaches_gradients(feature: Feature) -> bool:
    """Whether it changes an optimizer or the reduction of gradients."""
    rooms = ("megatron.core.optimizer.", "megatron.core.distributed.")
    return feature.name != NAME and any(str(each.target).startswith(rooms) for each in feature.patches)


FEATURES = [each for each in runtime.catalogue() if _reaches_gradients(each)]
# Words of a layout of `feature_layouts`, on two data-parallel ranks; the second has the distributed optimizer.
REDUCED = {"plain": "dp2", "LayerNorm": "dp2", "experts": "dp2", "delayed": "dp2", "overlapped": "", "gathered": ""}
ROWS = [
    (feature.name, layout)
    for feature in FEATURES
    for kind in (("plain", "delayed"), ("LayerNorm", "experts", "overlapped", "gathered"))
    for layout in [next((each for each in kind if not why_not(feature, each, NEW)), "")]
    if layout
]
QUICK = [("quant_states", "plain")]


def test_features_of_the_optimizer_are_found() -> None:
    found = {name for name, _ in ROWS}
    assert found >= {"quant_states", "reuse_fp32_param", "swap_optimizer", "use_fused_adamw", "virtual_optimizer"}
    assert {each.name for each in FEATURES} == found, "a feature that no layout here trains"


@pytest.mark.parametrize(("name", "layout"), matrix.only(QUICK, ROWS))
def test_features_train_with_compressed_gradients(trainer: Callable[[str], Trainer], name: str, layout: str) -> None:
    """As near to compression alone as the feature is to training without it."""
    its, feature = trainer(NEW), runtime.catalogue()[name]
    options: dict[str, Any] = {**options_of(f"{LAYOUTS[layout]} {REDUCED[layout]}"), "steps": 6}
    ranks, host = ranks_of(options), {"host_args": host_args(layout)}

    def train(flags: dict[str, Any] | None, **more: Any) -> Result:
        if flags is None:
            return its.core("device", ranks, options)
        given = {"strict": True, **flags, **host}
        return its.core("features", ranks, {**options, **more}, flags=given, before=COUNT)

    own = {**flags_of(feature), **on_and_off.MORE_FLAGS.get(name, {})}
    exact, alone = train(None), train({NAME: "int8"})
    both = train({**own, NAME: "int8"}, requested=name)
    gradient_bytes.check(alone)
    gradient_bytes.check(both)
    numerics = on_and_off.numerics_of(feature)
    assert on_and_off.Outcome(alone.steps(), both.steps()).fault(numerics) == ""
    assert fault(exact.steps(), both.steps(), on_and_off.DEVIATION) == "" and both.steps() != exact.steps()


DISTRIBUTED = "--use-distributed-optimizer"
OVERLAPPED = f"{DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather"
STATES = "--use-fused-adamw --quant-states fp8 --reuse-fp32-param"
# The loss scale grows every step until one overflows; Megatron resumes from no checkpoint before the first update.
FP16 = "--fp16 --initial-loss-scale 2097152 --loss-scale-window 1 --hysteresis 1"
EXPERTS = SCRIPT_LAYOUTS["ep2"][1]
# Ranks and flags.
KILLED: dict[str, tuple[int, str]] = {
    "all-reduce": (2, ""),
    "distributed": (2, OVERLAPPED),
    "asynchronous": (2, f"{DISTRIBUTED} --async-save"),
    "fp16": (2, FP16),
    "fp16, distributed": (2, f"{FP16} {DISTRIBUTED}"),
    "tp2": (4, f"--tensor-model-parallel-size 2 --sequence-parallel {OVERLAPPED}"),
    "pp2": (4, "--pipeline-model-parallel-size 2 --overlap-grad-reduce"),
    "pp2, distributed": (4, f"--pipeline-model-parallel-size 2 {DISTRIBUTED}"),
    "ep2": (4, f"{EXPERTS} --overlap-grad-reduce"),
    "ep2, distributed": (4, f"{EXPERTS} {OVERLAPPED}"),
    "states": (2, STATES),
    "states, distributed": (2, f"{OVERLAPPED} {STATES} --reset-bucket-group-order"),
    "swapped": (2, f"{DISTRIBUTED} --swap-optimizer --swap-optimizer-times 4"),
    "in host memory": (2, f"{DISTRIBUTED} --virtual-optimizer all"),
}


@pytest.mark.parametrize("row", matrix.only(["states, distributed"], [*KILLED]))
def test_a_killed_run_goes_on_with_the_same_bits(trainer: Callable[[str], Trainer], row: str, tmp_path: Path) -> None:
    """Killed after a checkpoint in the warm-up, resumed, killed after one that has error feedback, resumed."""
    its, steps, (ranks, flags) = trainer(NEW), 12 if "fp16" in row else 8, KILLED[row]
    model = [each for each in MODEL if each != "--bf16" or "--fp16" not in flags]
    warmup = 3
    common = [*NO_DROPOUT, *flags.split(), "--ckpt-format", "torch_dist", "--save-interval", "2",
              "--mindspeed-lite-strict", "--grad-reduce-compression", "int8",
              "--grad-reduce-compression-warmup", str(warmup)]  # fmt: skip

    def train(folder: Path, **job: Any) -> Result:
        argv = [SCRIPT, *model, "--train-iters", str(steps), *common, "--save", str(folder), "--load", str(folder)]
        before = "streams" if "swap" in row else ""
        return its.run(arm="adaptor", entry="script", nproc=ranks, argv=argv, before=before, **job)

    whole, place = train(tmp_path / "whole").check().history(), tmp_path / "killed"
    assert any("grad norm" not in each for each in whole) == ("fp16" in row), "a step was skipped"
    for step in (4, 6):
        assert train(place, kill_when={"log": f"iteration {step:8d}/"}).codes == [-9] * ranks
        assert len([*place.glob(f"*/{NAME}_*.pt")]) >= ranks
    saved = int((place / "latest_checkpointed_iteration.txt").read_text())
    assert warmup < saved < steps
    resumed = train(place).check()
    assert "starts at zero" not in resumed.log()
    # The second line that Megatron logs after a resume averages two iterations, on every device.
    got, expected = resumed.history(), whole[saved:]
    assert len(got) == len(expected) > 1
    assert [got[0], *got[2:]] == [expected[0], *expected[2:]]
