"""Megatron's own script on the stand-in's layers: checkpoints with features and without, and features of scripts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import checkouts, matrix
from tests.harness import unequal_lengths as balance
from tests.harness.checkpoints import WAYS, Checkpoint, goes_on
from tests.harness.rows import DRIFT, NEW
from tests.harness.training import LAYOUTS, NO_DROPOUT, Result, Trainer
from tests.te_contract.conftest import STAND_IN

LAYERS = "--transformer-impl transformer_engine"
STATES = f"{LAYERS} --use-distributed-optimizer --ckpt-format torch_dist"
EXPERTS = (
    f"{LAYERS} {LAYOUTS['ep2'][1]} --moe-grouped-gemm --moe-router-dtype fp32 --use-distributed-optimizer "
    "--ckpt-format torch_dist"
)
CHECKPOINTS = {
    "states": Checkpoint(
        STATES,
        "--use-fused-adamw --reuse-fp32-param --use-fused-cross-entropy", 1, near=DRIFT.loss,
    ),
    "experts": Checkpoint(EXPERTS, "--moe-zero-memory level1 --moe-alltoall-overlap-comm", near=DRIFT.loss),
    "delayed": Checkpoint(
        f"{LAYERS} --pipeline-model-parallel-size 2 --gradient-accumulation-fusion --ckpt-format torch_dist",
        "--pipeline-schedule zb-auto", near=DRIFT.loss,
    ),
    "other implementation": Checkpoint(
        f"{STATES} --dist-ckpt-optim-fully-reshardable --dist-ckpt-strictness log_all",
        "--transformer-impl local --use-fused-adamw --reuse-fp32-param --use-fused-cross-entropy", near=DRIFT.loss,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    made = Trainer(checkouts.folder(NEW), tmp_path_factory.mktemp("te-scripts"), training=True, packages=str(STAND_IN))
    yield made
    made.close()


@pytest.fixture(scope="module")
def written() -> Iterator[dict[str, tuple[Path, Result]]]:
    yield {}


@matrix.whole
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_go_both_ways(
    scripts: Trainer,
    written: dict[str, tuple[Path, Result]],
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    way: str,
) -> None:
    goes_on(scripts, CHECKPOINTS[name], way, written, tmp_path_factory)


@matrix.whole
def test_experts_take_the_tensor_parallel_ranks(scripts: Trainer) -> None:
    given = [*NO_DROPOUT, *LAYERS.split(), *"--tensor-model-parallel-size 2 --sequence-parallel".split()]
    given += "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm".split()
    megatrons = "--expert-tensor-parallel-size 1 --expert-model-parallel-size 2"
    off, on = (scripts.script(2, [*given, *more.split()], 2).check() for more in (megatrons, "--moe-tp-extend-ep"))
    assert on.steps() == off.steps() and len(on.steps()) == 2


@matrix.whole
def test_lengths_are_balanced(scripts: Trainer, tmp_path: Path) -> None:
    off, on = (balance.run(scripts, 2, tmp_path, flags, layers=LAYERS) for flags in ("", balance.FLAG))
    assert balance.distance(off, on) <= balance.OTHER_ORDER
