"""What jobs of examples/pretrain_gpt.py are trained with: the model, parallel layouts, and the losses they log."""

from __future__ import annotations

from typing import Any

from tests.harness.checkouts import ROOT
from tests.harness.training import Result, Trainer

SCRIPT = str(ROOT / "examples" / "pretrain_gpt.py")
MODEL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --bf16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 255 --normalization RMSNorm --swiglu --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --log-interval 1 --eval-iters 1 "
    "--eval-interval 100 --seed 42 --split 90,5,5"
).split()

NO_DROPOUT = ["--hidden-dropout", "0", "--attention-dropout", "0"]
LAYOUTS: dict[str, tuple[int, str]] = {
    "single": (1, ""),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "tp2_sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp2_vpp2": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4"),
    "dp2_distributed_optimizer": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "ep2": (
        2,
        "--expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
        "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2",
    ),
}


def train(trainer: Trainer, arm: str, nproc: int, arguments: list[str], iterations: int = 4, **job: Any) -> Result:
    argv = [SCRIPT, *MODEL, "--train-iters", str(iterations), *arguments]
    return trainer.run(entry="script", arm=arm, nproc=nproc, argv=argv, **job)


def lm_losses(result: Result) -> list[float]:
    return [float.fromhex(loss) for loss, _ in lm_steps(result)]


def lm_steps(result: Result) -> list[tuple[str, str]]:
    """Losses and gradient norms as `core_trainings.fault` takes them."""
    return [(step["lm loss"], step["grad norm"]) for step in result.history() if "lm loss" in step]


# Of a checkpoint by two data-parallel ranks: whether the optimizer is distributed, and who reads it.
READERS: dict[str, tuple[bool, int, str]] = {
    "one rank": (True, 1, ""),
    "tensor parallel": (True, 2, "--tensor-model-parallel-size 2"),
    "pipeline": (True, 2, "--pipeline-model-parallel-size 2"),
    "one rank, plain optimizer": (False, 1, ""),
    "tensor parallel, plain optimizer": (False, 2, "--tensor-model-parallel-size 2"),
}
