"""Long sequences over ranks: what a rank keeps beside what one process keeps, and a limit that one cannot meet."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_lite.bench import memory_run
from mindspeed_lite.planner import ranks, read
from tests.bench.test_predicted import LLAMA, NEWEST, measure
from tests.harness.checkouts import ROOT
from tests.harness.matrix import whole
from tests.harness.processes import clean_environment
from tests.harness.training import Trainer

LONG = f"{LLAMA} --num-layers 2 --hidden-size 64 --seq-length 16384 --max-position-embeddings 16384"
LONG += " --micro-batch-size 1 --global-batch-size 1 --vocab-size 511 --use-flash-attn"
LLAMA3 = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --seq-length 16384 --micro-batch-size 1 --bf16 --swiglu --disable-bias-linear "
    "--normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --vocab-size 128256 "
    "--hidden-dropout 0 --attention-dropout 0 --use-flash-attn"
).split()


@whole
def test_four_ranks_keep_at_most_three_tenths_of_what_one_keeps(
    trainer: Callable[[str], Trainer], tmp_path_factory: pytest.TempPathFactory
) -> None:
    kept = {}
    for size in (1, 4):
        words = [*LONG.split(), "--context-parallel-size", str(size)]
        found = measure(trainer(NEWEST), size, words, tmp_path_factory.mktemp("long"))
        compared = memory_run.compare(ranks(read(words, size, "cpu")), found)
        assert not [each for each in compared if abs(each.deviation) > memory_run.TOLERANCE]
        kept[size] = max(each.bytes["activations"] for each in found)
    assert kept[4] <= 0.3 * kept[1], kept


@pytest.mark.parametrize("algorithm", ["megatron_cp_algo", "ulysses_cp_algo", "kvallgather_cp_algo"])
def test_so_it_is_predicted_for_a_large_model(algorithm: str) -> None:
    words = [*LLAMA3, "--context-parallel-algo", algorithm, "--context-parallel-size"]
    alone, shared = (max(ranks(read([*words, str(size)], size)), key=lambda rank: rank.total) for size in (1, 4))
    assert shared.activations <= 0.3 * alone.activations


@whole
@pytest.mark.parametrize("ranks_of_a_sequence", [1, 4])
def test_a_limit_that_one_process_does_not_meet_and_four_do(ranks_of_a_sequence: int, tmp_path: Path) -> None:
    ran = subprocess.run(
        ["bash", str(ROOT / "examples" / "long_context.sh"), str(ranks_of_a_sequence)],
        cwd=tmp_path, capture_output=True, text=True, env=clean_environment(), timeout=600,
    )  # fmt: skip
    output = ran.stdout + ran.stderr
    if ranks_of_a_sequence == 1:
        assert ran.returncode and "can't allocate memory" in output
    else:
        assert ran.returncode == 0, output[-3000:]
        assert "iteration        1/       1" in output
