"""Checkpoints in real training: written with a feature and read without it, the reverse, and by other layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness import checkouts, matrix
from tests.harness.checkpoints import WAYS, Checkpoint, goes_on
from tests.harness.rows import DRIFT, NEW
from tests.harness.training import LAYOUTS, NO_DROPOUT, Result, Trainer

DISTRIBUTED = "--use-distributed-optimizer"
RESHARDABLE = f"{DISTRIBUTED} --dist-ckpt-optim-fully-reshardable"
EXPERTS = f"{LAYOUTS['ep2'][1]} --moe-grouped-gemm --gradient-accumulation-fusion {DISTRIBUTED}"
ALONE = (1, "--expert-model-parallel-size 1 --no-load-optim")
PLACED = "--enable-expert-placement --expert-placement-freq 1 --expert-placement-break-even 0"
OPERATORS = Checkpoint(
    DISTRIBUTED, "--use-fused-rmsnorm --use-flash-attn --use-fused-adamw", 1, near=DRIFT.loss, quick=WAYS[:1]
)
TABLE = {
    "operators": OPERATORS,
    # In the format that may be loaded by another number of ranks.
    "operators, reshardable": replace(OPERATORS, given=RESHARDABLE, quick=WAYS[1:]),
    # Megatron's optimizer has other groups of parameters without expert parallelism and does not load these.
    "grouped experts": Checkpoint(
        f"{LAYOUTS['ep2'][1]} --moe-router-dtype fp32", "--moe-grouped-gemm --moe-permute-fusion --moe-router-fusion",
        reader=ALONE, same_model=False, near=DRIFT.loss, quick=WAYS[:1],
    ),
    "V": Checkpoint(
        f"--num-layers 4 --pipeline-model-parallel-size 2 --gradient-accumulation-fusion {RESHARDABLE}",
        "--schedules-method dualpipev", near=DRIFT.loss, quick=WAYS[:1],
    ),
    "alltoall, released": Checkpoint(
        f"{EXPERTS} --moe-token-dispatcher-type alltoall", "--moe-alltoall-overlap-comm --moe-zero-memory level0"
    ),
    "allgather": Checkpoint(f"{EXPERTS} --moe-token-dispatcher-type allgather", "--moe-allgather-overlap-comm"),
    "copies": Checkpoint(
        f"{EXPERTS} --moe-token-dispatcher-type alltoall",
        "--balanced-moe-experts --balanced-moe-hot-expert-num 2 --balanced-moe-break-even 0", near=DRIFT.loss,
        before="skewed_router",
    ),
}  # fmt: skip
# Ranks that split a sequence hold the same model as one.
for ranks, others, quick in ((2, 1, ("off-off",)), (1, 2, ())):
    TABLE[f"{ranks} parts of a sequence by {others}"] = Checkpoint(
        f"{DISTRIBUTED} --ckpt-format torch_dist --context-parallel-size {ranks}", "", ranks, ("off-off",), quick,
        (others, f"--context-parallel-size {others}"), near=2.0**-10,
    )  # fmt: skip
# Optimizers' states in other forms and places, by two data-parallel ranks.
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
for format, readers in {
    RESHARDABLE: {"one rank": (1, ""), "tp2": (2, TP2), "pp2": (2, PP2)},
    "": {"one rank, plain optimizer": (1, ""), "tp2, plain optimizer": (2, TP2)},
}.items():
    for name, reader in readers.items():
        halves = Checkpoint(
            f"--ckpt-format torch_dist --use-fused-adamw {format}", "--reuse-fp32-param", reader=reader,
            same_model=False, quick=WAYS if name == "tp2" else (),
        )  # fmt: skip
        TABLE[f"halves by {name}"] = halves
        TABLE[f"swapped by {name}"] = replace(
            halves, on="--swap-optimizer --swap-optimizer-times 4", before="swap_optimizer", quick=()
        )
for form in ("fp8", "bf16"):
    for format, quick in ((DISTRIBUTED, ("on-on",) if form == "fp8" else ()), ("", ())):
        TABLE[f"{form} and halves {format}"] = Checkpoint(
            f"--ckpt-format torch_dist {format}", f"--quant-states {form} --reuse-fp32-param", ways=("on-on",),
            quick=quick,
        )  # fmt: skip
for format in (
    "torch", f"torch {DISTRIBUTED}", f"torch_dist {DISTRIBUTED}", f"torch_dist {DISTRIBUTED} --ckpt-fully-parallel-load"
):  # fmt: skip
    TABLE[f"swapped in {format}"] = Checkpoint(
        f"--ckpt-format {format}", "--swap-optimizer", ways=("on-on",), before="swap_optimizer"
    )
# Experts that have changed places.
PLACES = f"{LAYOUTS['ep2'][1]} --num-experts 8 --clip-grad 1000"
OVERLAPPED = f"{DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather"
for name, flags in {
    "distributed": OVERLAPPED, "plain": "", "quantized": f"{DISTRIBUTED} --quant-states fp8 --reuse-fp32-param",
    "asynchronous": f"{DISTRIBUTED} --async-save",
}.items():  # fmt: skip
    TABLE[f"places, {name}"] = Checkpoint(
        f"{PLACES} {flags}", PLACED, ways=("on-off", "off-on", "on-on"), before="drawn_placements"
    )
# Other expert-parallel sizes read it too: one rank adds in another order.
TABLE["places by one rank"] = Checkpoint(
    f"{PLACES} {OVERLAPPED}", PLACED, ways=("on-off",), reader=ALONE,
    near=DRIFT.loss, before="drawn_placements", same_model=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def written() -> Iterator[dict[str, tuple[Path, Result]]]:
    """By job, the checkpoints that this module has written."""
    yield {}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=() if way in row.quick else matrix.whole)
        for name, row in TABLE.items()
        for way in row.ways
    ],
)
def test_training_goes_on(
    trainer: Callable[[str], Trainer],
    written: dict[str, tuple[Path, Result]],
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    way: str,
) -> None:
    goes_on(trainer(NEW), TABLE[name], way, written, tmp_path_factory)


CHECKPOINTED = (
    "--use-distributed-optimizer --ckpt-format torch_dist --save-interval 2 --num-workers 2 --hidden-dropout 0.1 "
    "--attention-dropout 0.1"
).split()


@matrix.whole
@pytest.mark.parametrize(
    ("release", "mode"), [(NEW, ["--async-save"]), ("0.17.1", [])], ids=[f"{NEW}-async", "0.17.1-sync"]
)
def test_a_killed_run_resumes_on_the_same_loss_curve(
    trainer: Callable[[str], Trainer], release: str, mode: list[str], tmp_path: Path
) -> None:
    """Two data-parallel ranks, dropout, data workers: killed in training, resumed, killed in saving, resumed."""
    steps, place, its = 10, tmp_path / "killed", trainer(release)
    whole = its.script(2, [*CHECKPOINTED, *mode, "--save", str(tmp_path / "whole")], steps).check()
    arguments = [*CHECKPOINTED, *mode, "--save", str(place), "--load", str(place)]
    tracker = place / "latest_checkpointed_iteration.txt"

    # The third line of the log comes after the checkpoint of iteration 2 has been scheduled.
    assert its.script(2, arguments, steps, kill_when={"log": "iteration        5/"}).codes == [-9, -9]
    saved = int(tracker.read_text())
    assert saved in (2, 4)

    # A checkpoint's folder exists from the start of its saving, the tracker names it at the end.
    begun = str(place / f"iter_{saved + 2:07d}")
    assert its.script(2, arguments, steps, kill_when={"path": begun}).codes == [-9, -9]
    assert int(tracker.read_text()) == saved, "it was killed after saving"

    got, expected = its.script(2, arguments, steps).check().losses(), whole.losses()[saved:]
    assert len(got) == len(expected) > 2
    # The second line that Megatron logs after a resume averages two iterations, on every device.
    assert [got[0], *got[2:]] == [expected[0], *expected[2:]]


@pytest.mark.parametrize("release", matrix.only([NEW], checkouts.WITH_TRAINING))
def test_a_kill_between_two_exchanges_of_experts_loses_nothing(
    trainer: Callable[[str], Trainer], release: str, tmp_path: Path
) -> None:
    """The checkpoint before it goes on without the feature, with the losses of a run that never had it."""
    given, its = [*NO_DROPOUT, *PLACES.split(), *OVERLAPPED.split()], trainer(release)
    whole = its.script(2, given).check().losses()
    saving = [*given, "--save", str(tmp_path), "--save-interval", "2", *PLACED.split()]
    killed = its.script(2, saving, before="killed_between_exchanges")
    assert any(killed.codes) and "experts changed places" in killed.log(0) and "home 2" in killed.log(0)
    assert its.script(2, [*given, "--load", str(tmp_path)]).check().losses() == whole[2:]
