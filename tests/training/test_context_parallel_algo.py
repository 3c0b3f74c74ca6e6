"""Real training with a sequence split over ranks against one rank, with the same global batch; and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import checkouts, matrix
from tests.harness.script_trainings import NO_DROPOUT, lm_losses, train
from tests.harness.training import Trainer

EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
# What trains, the ranks, its flags, and those of the run on one context-parallel rank that it is held against.
RUNS: dict[str, tuple[int, str, str]] = {
    "ring": (2, "--context-parallel-size 2 --context-parallel-algo megatron_cp_algo --use-distributed-optimizer", ""),
    "ulysses": (2, "--context-parallel-size 2 --context-parallel-algo ulysses_cp_algo --use-flash-attn", ""),
    "types of layers": (2, "--context-parallel-size 2 --cp-comm-type all_gather p2p", ""),
    "hybrid": (4, "--context-parallel-size 4 --ulysses-degree-in-cp 2", ""),
    "double ring": (4, "--context-parallel-size 4 --cp-window-size 2 --use-cp-send-recv-overlap", ""),
    "tp2_sp": (4, "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel", ""),
    "pp2": (4, "--context-parallel-size 2 --pipeline-model-parallel-size 2 --recompute-granularity selective", ""),
    "pp2_vpp2": (
        4,
        "--context-parallel-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--num-layers 4",
        "--num-layers 4",
    ),
    "ep2": (2, f"--context-parallel-size 2 --expert-model-parallel-size 2 {EXPERTS}", EXPERTS),
    "latent": (
        2,
        "--context-parallel-size 2 --context-parallel-algo megatron_cp_algo --multi-latent-attention --use-flash-attn",
        "--multi-latent-attention --use-flash-attn",
    ),
    "recomputed": (
        2,
        "--context-parallel-size 2 --context-parallel-kv-cache-policy half --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
        "",
    ),
    "dp2": (4, "--context-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce", ""),
}
# bf16 weights: two orders of summation of the same products.
CLOSE = 2**-10


@pytest.mark.parametrize(
    ("release", "name"),
    matrix.only(
        [("0.19.2", "ring"), ("0.19.2", "ulysses"), ("0.17.1", "ring")],
        [(release, name) for release in checkouts.WITH_TRAINING for name in RUNS],
    ),
)
def test_losses_are_those_of_one_rank(trainer: Callable[[str], Trainer], release: str, name: str) -> None:
    ranks, flags, alone = RUNS[name]
    one = train(trainer(release), "adaptor", 1, [*NO_DROPOUT, *alone.split()]).check()
    many = train(trainer(release), "adaptor", ranks, [*NO_DROPOUT, *flags.split()]).check()
    assert len(lm_losses(many)) == len(lm_losses(one)) == 4
    assert lm_losses(many) == pytest.approx(lm_losses(one), rel=CLOSE)
    assert many.history() != one.history(), "another order of summation differs in the last digits"


@pytest.mark.parametrize(
    ("writer", "reader"),
    matrix.only([(2, 1)], [(2, 1), (1, 2)]),
)
def test_a_checkpoint_goes_on_with_another_number_of_ranks(
    trainer: Callable[[str], Trainer], tmp_path: Path, writer: int, reader: int
) -> None:
    """Four steps at once, or two, saved, and two more by the other number of ranks."""
    its = trainer(checkouts.ALL[-1])

    def flags(ranks: int) -> list[str]:
        return [*NO_DROPOUT, "--context-parallel-size", str(ranks), "--use-distributed-optimizer"]

    at_once = train(its, "adaptor", writer, flags(writer)).check()
    folder = ["--ckpt-format", "torch_dist", "--save", str(tmp_path), "--save-interval", "2"]
    train(its, "adaptor", writer, [*flags(writer), *folder, "--exit-interval", "2"]).check()
    resumed = train(its, "adaptor", reader, [*flags(reader), "--load", str(tmp_path)]).check()
    assert len(lm_losses(resumed)) == 2
    assert lm_losses(resumed) == pytest.approx(lm_losses(at_once)[2:], rel=CLOSE)
