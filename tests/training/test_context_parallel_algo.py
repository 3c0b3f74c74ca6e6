"""Real training with a sequence split over ranks against one rank, with the same global batch; and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import checkouts, matrix
from tests.harness.core_trainings import fault, losses
from tests.harness.script_trainings import NO_DROPOUT, lm_losses, lm_steps, train
from tests.harness.training import Trainer

EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2 --recompute-granularity selective"
VPP2 = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4"
LATENT = "--multi-latent-attention --use-flash-attn"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
RING, ULYSSES = "--context-parallel-algo megatron_cp_algo", "--context-parallel-algo ulysses_cp_algo"
# Context-parallel ranks and their flags; ranks besides, and flags of both runs: Megatron initialises weights by layout.
RUNS: dict[str, tuple[int, str, int, str]] = {
    "ring": (2, f"{RING} --use-distributed-optimizer", 1, ""),
    "ulysses": (2, f"{ULYSSES} --use-flash-attn", 1, ""),
    "types of layers": (2, "--cp-comm-type all_gather p2p", 1, ""),
    "hybrid": (4, "--ulysses-degree-in-cp 2", 1, ""),
    "double ring": (4, "--cp-window-size 2 --use-cp-send-recv-overlap", 1, ""),
    "tp2_sp": (2, RING, 2, TP2),
    "pp2": (2, RING, 2, PP2),
    "pp2_vpp2": (2, ULYSSES, 2, VPP2),
    "ep2": (2, f"--expert-model-parallel-size 2 {RING}", 1, EXPERTS),
    "latent": (2, RING, 1, LATENT),
    "recomputed": (2, "--context-parallel-kv-cache-policy half", 1, RECOMPUTED),
    "mtp": (2, RING, 1, "--mtp-num-layers 1"),
    "window": (2, RING, 1, "--window-size 5,0 --qk-layernorm"),
    "sink": (2, ULYSSES, 1, "--softmax-type learnable"),
    "reset mask": (2, "", 1, "--reset-attention-mask --reset-position-ids --eod-mask-loss"),
    "swapped": (2, RING, 1, "--swap-attention"),
    "fused": (2, RING, 1, "--use-flash-attn --gradient-accumulation-fusion --use-fused-rotary-pos-emb"),
    "dp2": (2, "--use-distributed-optimizer --overlap-grad-reduce", 2, ""),
}
# bf16 weights: two orders of summation of the same products.
CLOSE = 2**-10


@pytest.mark.parametrize(
    ("release", "name"),
    matrix.only(
        [("0.19.2", "tp2_sp"), ("0.19.2", "ulysses"), ("0.17.1", "ring")],
        [(release, name) for release in checkouts.WITH_TRAINING for name in RUNS],
    ),
)
def test_losses_are_those_of_one_rank(trainer: Callable[[str], Trainer], release: str, name: str) -> None:
    ranks, flags, others, both = RUNS[name]
    arguments = [*NO_DROPOUT, *both.split()]
    split = [*arguments, "--context-parallel-size", str(ranks), *flags.split()]
    one = train(trainer(release), "adaptor", others, arguments).check()
    many = train(trainer(release), "adaptor", ranks * others, split).check()
    assert len(lm_losses(many)) == len(lm_losses(one)) == 4
    assert fault(lm_steps(one), lm_steps(many), CLOSE) == ""
    assert many.history() != one.history(), "another order of summation differs in the last digits"


RING_ALONE, ALL_HEADS = {"context_parallel_algo": "megatron_cp_algo"}, {"context_parallel_algo": "ulysses_cp_algo"}
PACKS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "ring": (2, "padded", RING_ALONE),
    "ulysses": (2, "documents", ALL_HEADS),
    "gathered": (2, "padded", {"context_parallel_algo": "kvallgather_cp_algo"}),
    "double ring": (4, "documents", {**RING_ALONE, "cp_window_size": 2}),
}


@pytest.mark.parametrize(
    ("release", "name"),
    matrix.pairs([*PACKS], [("0.16.1", "ring"), ("0.17.1", "ulysses")], newest=["ring"]),
)
def test_packs_are_split_and_trained_on_as_on_one_rank(
    trainer: Callable[[str], Trainer], release: str, name: str
) -> None:
    """By Megatron's own partition of a pack, which each release has under another name."""
    ranks, packed, algorithm = PACKS[name]
    options, flash = {"packed": packed, "steps": 4, "lr": 1e-3}, {"use_flash_attn": True, "strict": True}
    split = {**flash, **algorithm, "context_parallel_size": ranks}
    one = trainer(release).core("features", 1, options, flags=flash)
    many = trainer(release).core("features", ranks, {**options, "cp": ranks}, flags=split)
    assert fault(one.history(), many.history(), CLOSE) == ""
    assert len(losses(one)) == 4 and losses(one)[-1] < losses(one)[0] - 0.1


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
