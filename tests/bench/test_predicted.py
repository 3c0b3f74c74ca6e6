"""Predicted beside measured: real trainings in which weights, gradients, states and activations are counted."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_lite.bench import harness, memory_run
from mindspeed_lite.bench.plan import VARIABLE, Arm, Job, RunPlan
from mindspeed_lite.planner import ranks, read
from tests.harness import checkouts, matrix
from tests.harness.checkouts import ROOT
from tests.harness.processes import clean_environment
from tests.harness.training import Trainer

SCRIPT = str(ROOT / "tests" / "bench" / "measured_script.py")

# Large enough that what is kept for every layer is most of it, small enough for seconds.
RUN = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 2 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 2047 --log-interval 1 "
    "--eval-iters 0 --eval-interval 1000 --seed 42 --train-iters 10 --disable-jit-fuser --bf16"
)
GPT2 = f"{RUN} --hidden-dropout 0.1 --attention-dropout 0.1"
LLAMA = (
    f"{RUN} --ffn-hidden-size 384 --normalization RMSNorm --swiglu --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0"
)
# Untrained routers and few tokens: left to themselves they would spread unevenly.
MOE = (
    f"{LLAMA} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-router-force-load-balancing"
)
ON = "--use-flash-attn --use-fused-rmsnorm --use-fused-swiglu --use-fused-cross-entropy --use-fused-rotary-pos-emb"
GIVES_UP = (
    "--use-flash-attn --use-fused-rmsnorm --use-fused-linear-cross-entropy --recompute-norm "
    "--recompute-activation-function"
)
FULL = "--recompute-granularity full --recompute-num-layers 1 --recompute-method uniform"
BLOCK = FULL.replace("uniform", "block")
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
EP2 = "--expert-model-parallel-size 2"
CP2, GQA = "--context-parallel-size 2", "--group-query-attention --num-query-groups 2"
GROUPED = "--moe-grouped-gemm --moe-permute-fusion --moe-router-fusion"
SP, DISTRIBUTED = "--sequence-parallel", "--use-distributed-optimizer"
SHARED, STAGES = "--moe-shared-expert-intermediate-size", "--pipeline-model-parallel-layout"
CACHED = "--context-parallel-kv-cache-policy"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
WIDE_QUERIES = (
    "--multi-latent-attention --kv-lora-rank 32 --qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 24 "
    "--rotary-scaling-factor 40 --use-flash-attn"
)
LATENT = f"{WIDE_QUERIES} --q-lora-rank 48"
DEEPSEEK = (
    f"{MOE} {LATENT} --qk-layernorm {ON} {GROUPED} {PP2} --mtp-num-layers 1 --num-layers 3 "
    f"--moe-layer-freq ([0]*1+[1]*2) {SHARED} 64 {DISTRIBUTED}"
)
OVERLAPPED = f"--moe-fb-overlap --gradient-accumulation-fusion {EP2}"

# Name -> (ranks, global batch size, arguments); a micro-batch is 2.
TRAININGS: dict[str, tuple[int, int, str]] = {
    "dense, on": (1, 4, f"{LLAMA} {ON}"),
    "dense, gives up": (1, 2, f"{LLAMA} {GIVES_UP}"),
    "gpt2": (1, 4, GPT2),
    "narrow states": (1, 4, f"{LLAMA} {ON} --reuse-fp32-param --quant-states fp8"),
    "states in host memory": (1, 4, f"{LLAMA} {ON} --virtual-optimizer all"),
    "recomputed": (1, 4, f"{LLAMA} {ON} {FULL}"),
    "partly recomputed": (1, 4, f"{LLAMA} {BLOCK.replace('1', '2')}"),
    "grouped queries": (1, 4, f"{LLAMA} {GQA} --qk-layernorm"),
    "tp2 sp, on": (2, 2, f"{LLAMA} {ON} {TP2} {SP} --recompute-norm {GQA} --qk-layernorm"),
    "pp2 vpp2, on": (2, 8, f"{LLAMA} {ON} {VPP2}"),
    "dp2 distributed, on": (2, 8, f"{LLAMA} {ON} {DISTRIBUTED} --reuse-fp32-param --quant-states bf16"),
    "ep2": (2, 8, f"{MOE} {EP2}"),
    "ep2, on": (2, 4, f"{MOE} {ON} {GROUPED} {EP2} {SHARED} 256 {DISTRIBUTED} --recompute-activation-function"),
    "ep2, rows given up": (2, 4, f"{MOE} {ON} {GROUPED} {EP2} --moe-zero-memory level1 --moe-zero-memory-num-layers 2"),
    "tp2 pp2 ep2, on": (4, 8, f"{MOE} {ON} {GROUPED} {TP2} {SP} {PP2} {EP2} --expert-tensor-parallel-size 1"),
    # Sequences that are split over ranks.
    "cp2, an algorithm each": (2, 4, f"{LLAMA} {CP2} {GQA} --cp-comm-type p2p a2a all_gather p2p {DISTRIBUTED}"),
    "cp2, ulysses": (2, 2, f"{LLAMA} {ON} {CP2} --context-parallel-algo ulysses_cp_algo"),
    "cp2, ulysses, keys gathered": (2, 2, f"{LLAMA} {CP2} {GQA} --use-ulysses-allgather-kv"),
    "cp2, gpt2": (2, 4, f"{GPT2} {CP2} --context-parallel-algo megatron_cp_algo"),
    "cp2, recomputed": (2, 4, f"{LLAMA} {CP2} {FULL}"),
    "tp2 cp2 sp": (4, 4, f"{LLAMA} {ON} {CP2} {GQA} {TP2} {SP} {DISTRIBUTED}"),
    "cp4, hybrid": (4, 4, f"{LLAMA} --context-parallel-size 4 {GQA} --ulysses-degree-in-cp 2 {CACHED} half"),
    "cp2 ep2": (2, 4, f"{MOE} {CP2} {EP2} {DISTRIBUTED}"),
    # Latent attention and multi-token prediction, alone and together.
    "latent, queries wide, not yarn": (1, 2, f"{LLAMA} {WIDE_QUERIES} {ON} --num-layers 2 --rope-type rope"),
    "latent, norms recomputed": (1, 2, f"{LLAMA} {LATENT} --qk-layernorm {ON} {SELECTIVE} core_attn layernorm"),
    "latent, tp2 sp, further tokens, on": (
        2, 2, f"{LLAMA} {LATENT} --qk-layernorm {ON} {TP2} {SP} --mtp-num-layers 2 --num-layers 2 --recompute-norm",
    ),
    "latent, cp2, ring": (2, 2, f"{LLAMA} {LATENT} {CP2} {CACHED} full --mtp-num-layers 1"),
    "latent, cp2, ulysses": (2, 2, f"{LLAMA} {LATENT} --qk-layernorm {CP2} --context-parallel-algo ulysses_cp_algo"),
    "further tokens, pp2, tied": (2, 8, f"{GPT2} --position-embedding-type rope --mtp-num-layers 1 {PP2}"),
    "further tokens, partly recomputed": (1, 2, f"{LLAMA} --mtp-num-layers 1 {BLOCK}"),
    "stages by hand": (2, 8, f"{LLAMA} {ON} {PP2} {STAGES} E|tt|tt|L"),
    # What DeepSeek-V3's launch script has.
    "as DeepSeek-V3": (2, 8, f"{DEEPSEEK} {STAGES} Et|tt|m|L"),
    "as DeepSeek-V3, recomputed": (2, 8, f"{DEEPSEEK} {STAGES} Et|t|t,m|L {FULL}"),
    # Two micro-batches under way, tokens that are dropped or padded, and routing that is not even.
    "ep2, overlapped, on": (2, 16, f"{MOE} {ON} {GROUPED} {OVERLAPPED}"),
    "pp2 vpp2 ep2, overlapped": (4, 16, f"{MOE} {ON} {GROUPED} {VPP2} {OVERLAPPED}"),
    "pp2, dualpipev": (2, 8, f"{LLAMA} {ON} {PP2} --schedules-method dualpipev --gradient-accumulation-fusion"),
    "ep2, padded": (2, 8, f"{MOE} {EP2} --moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity"),
}  # fmt: skip
# A sequence that counts beside the weights; and the shape of a large model, which is predicted alone.
LONG = f"{LLAMA} --num-layers 2 --hidden-size 64 --seq-length 16384 --max-position-embeddings 16384"
LONG += " --micro-batch-size 1 --global-batch-size 1 --vocab-size 511 --use-flash-attn"
LLAMA3 = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --seq-length 16384 --micro-batch-size 1 --bf16 --swiglu --disable-bias-linear "
    "--normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --vocab-size 128256 "
    "--hidden-dropout 0 --attention-dropout 0 --use-flash-attn"
).split()
NEWEST = checkouts.WITH_TRAINING[-1]
NAMES = (
    "dense, gives up", "ep2, on", "cp2, an algorithm each", "latent, tp2 sp, further tokens, on", "as DeepSeek-V3",
)  # fmt: skip
KEPT = [(NEWEST, name) for name in NAMES]
# What differs between releases: experts, and what is recomputed.
EVERY = [(NEWEST, name) for name in TRAININGS] + [
    (release, name)
    for release in checkouts.WITH_TRAINING[:-1]
    for name in (
        "partly recomputed", "grouped queries", "ep2", "ep2, on", "further tokens, partly recomputed", "as DeepSeek-V3",
    )
]  # fmt: skip

Measured = Callable[[str, str], list[memory_run.Measured]]


def measure(trainer: Trainer, nproc: int, words: list[str], folder: Path) -> list[memory_run.Measured]:
    job = Job((), folder, warmup=0, steps=2, timeout=1e4, memory=True)
    RunPlan(job, Arm("memory", "given"), folder).write(folder / "plan")
    environment = {VARIABLE: str(folder / "plan"), "MINDSPEED_LITE_DEVICE": "cpu"}
    trainer.run(entry="script", arm="adaptor", nproc=nproc, argv=[SCRIPT, *words], env=environment).check()
    processes = harness.read(folder)
    assert len(processes) == nproc
    return [memory_run.measured(process) for process in processes]


def asked(name: str) -> tuple[int, list[str]]:
    nproc, batch, words = TRAININGS[name]
    return nproc, [*words.split(), "--global-batch-size", str(batch)]


@pytest.fixture(scope="module")
def measured(
    trainer: Callable[[str], Trainer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Measured:
    """What a training took, run when a test first asks for it."""
    done: dict[tuple[str, str], list[memory_run.Measured]] = {}

    def of(release: str, name: str) -> list[memory_run.Measured]:
        if (release, name) not in done:
            done[release, name] = measure(trainer(release), *asked(name), tmp_path_factory.mktemp("memory"))
        return done[release, name]

    return of


@pytest.mark.parametrize(("release", "name"), matrix.only(KEPT, EVERY))
def test_every_category_of_every_rank_is_as_predicted(measured: Measured, release: str, name: str) -> None:
    nproc, words = asked(name)
    found, predicted = measured(release, name), ranks(read(words, nproc, "cpu"))
    compared = memory_run.compare(predicted, found)
    assert {each.category for each in compared} >= {"weights", "gradients", "optimizer", "activations"}
    off = [(each, each.deviation) for each in compared if abs(each.deviation) > memory_run.TOLERANCE]
    assert not off
    # How many parameters there are is exact.
    assert [each.parameters for each in found] == [
        rank.parameters.total for each in found for rank in predicted if rank.ranks[0] <= each.rank <= rank.ranks[1]
    ]


def test_the_measurement_sees_a_feature_that_the_prediction_does_not(measured: Measured) -> None:
    """Predicted with attention's scores and trained without them: off, so that the test above can fail."""
    nproc, words = asked("dense, gives up")
    without = [word for word in words if word != "--use-flash-attn"]
    compared = memory_run.compare(ranks(read(without, nproc, "cpu")), measured(NEWEST, "dense, gives up"))
    assert [each.category for each in compared if each.is_off] == ["activations"]


@matrix.whole
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


@matrix.whole
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
