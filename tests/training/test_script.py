"""The example script with the adaptor line: no flag changes no bit; flags turn features on, which train as without."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from mindspeed_lite import runtime
from tests.harness import checkouts, matrix
from tests.harness.rows import DRIFT, NEW, Near
from tests.harness.training import LAYOUTS, MODEL, NO_DROPOUT, SCRIPT, Result, Trainer, fault

# What a user without Transformer Engine and Apex has to know and type; the adaptor does it for them.
SPELLED_OUT = (
    "--transformer-impl local --no-rope-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm "
    "--no-masked-softmax-fusion"
).split()


# Where Megatron's fused functions are compiled, as they are for a user; it costs ten seconds a process. They are
# arithmetic on tensors: what the device layer and the hooks change is not in them, whatever the layout.
@pytest.mark.parametrize(
    ("release", "layout", "compiled"),
    matrix.only(
        [(NEW, "tp2_sp", False)],
        [
            *((release, layout, False) for release in checkouts.WITH_TRAINING for layout in LAYOUTS),
            (NEW, "single", True),
        ],
    ),
)
def test_no_flag_is_bitwise_the_device_layer_alone(
    trainer: Callable[[str], Trainer], release: str, layout: str, compiled: bool
) -> None:
    ranks, flags = LAYOUTS[layout]
    given = [*NO_DROPOUT, *flags.split()]
    device = trainer(release).script(ranks, [*given, *SPELLED_OUT], arm="device", compile=compiled).check()
    adaptor = trainer(release).script_once(ranks, given, compile=compiled)
    assert len(adaptor.losses()) == 4 and adaptor.history() == device.history()
    assert "mindspeed_lite" not in device.log() and "--transformer-impl local set" in adaptor.log()
    line = next(line for line in adaptor.log().splitlines() if "memory (MB)" in line)
    assert 200 < float(line.partition("allocated: ")[2].split()[0]) < 4000, line


@dataclass(frozen=True)
class Flags:
    """Flags of both trainings, those of the features, and the features that must be applied then."""

    given: str
    on: str
    applied: str = ""
    ranks: int = 2
    # The releases of `make test`, and all.
    quick: str = ""
    releases: Sequence[str] = tuple(checkouts.WITH_TRAINING)
    # None: bit for bit.
    near: Near | None = None
    # Ranks of the training without the features, if others.
    reference: int = 0
    before: str = ""
    seen: str = ""
    compiled: bool = False


TP2, EP2 = LAYOUTS["tp2_sp"][1], LAYOUTS["ep2"][1]
MOE = f"{EP2} --moe-grouped-gemm --gradient-accumulation-fusion"
OPERATORS = "--use-fused-rmsnorm --use-flash-attn"
TABLE = {
    "operators": Flags(TP2, OPERATORS, "use_fused_rmsnorm use_flash_attn", quick="0.17.1", near=DRIFT),
    "operators, compiled": Flags(
        "", OPERATORS, "use_fused_rmsnorm use_flash_attn", 1, "", [NEW], near=DRIFT, compiled=True
    ),
    "combined schedule": Flags(
        f"{EP2} --gradient-accumulation-fusion", "--moe-fb-overlap", "moe_fb_overlap delay_wgrad_compute", quick=NEW
    ),
    "two levels": Flags(EP2, "--moe-hierarchical-alltoallv --moe-node-size 1"),
    "copies": Flags(
        MOE, "--balanced-moe-experts --balanced-moe-hot-expert-num 2 --balanced-moe-break-even 0", near=DRIFT,
        before="skewed_router copied_experts", seen="experts were copied",
    ),
}  # fmt: skip

# Exchanges of experts' tokens over split sequences, and over the layers of further tokens.
for name, dispatcher, flags in (
    ("alltoall", "alltoall", "--moe-alltoall-overlap-comm"),
    ("level1", "alltoall", "--moe-zero-memory level1"),
    ("alltoall and level0", "alltoall", "--moe-alltoall-overlap-comm --moe-zero-memory level0"),
    ("allgather", "allgather", "--moe-allgather-overlap-comm"),
    ("two levels", "alltoall", "--moe-hierarchical-alltoallv --moe-node-size 1"),
):
    for where, more in (
        ("split sequences", "--context-parallel-size 2 --context-parallel-algo ulysses_cp_algo"),
        ("further tokens", "--mtp-num-layers 1"),
    ):
        TABLE[f"{name}, {where}"] = Flags(
            f"{MOE} {more} --moe-token-dispatcher-type {dispatcher}", flags, releases=[NEW]
        )

# A sequence split over ranks, against one rank with the same global batch. bf16: two orders of the same sums.
CLOSE = Near(2.0**-10, norm=2.0**-7)
RING, ULYSSES = "--context-parallel-algo megatron_cp_algo", "--context-parallel-algo ulysses_cp_algo"
WHOLE_EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
for name, given, on, ranks, others, quick in (
    ("ring", "", f"{RING} --use-distributed-optimizer", 2, 1, ""),
    ("ulysses", "", f"{ULYSSES} --use-flash-attn", 2, 1, NEW),
    ("types of layers", "", "--cp-comm-type all_gather p2p", 2, 1, ""),
    ("hybrid", "", "--ulysses-degree-in-cp 2", 4, 1, ""),
    ("double ring", "", "--cp-window-size 2 --use-cp-send-recv-overlap", 4, 1, ""),
    ("ring, tp2_sp", TP2, RING, 2, 2, NEW),
    ("ring, pp2", "--pipeline-model-parallel-size 2 --recompute-granularity selective", RING, 2, 2, ""),
    ("ulysses, pp2_vpp2", LAYOUTS["pp2_vpp2"][1], ULYSSES, 2, 2, ""),
    ("ring, ep2", WHOLE_EXPERTS, f"--expert-model-parallel-size 2 {RING}", 2, 1, ""),
    ("ring, latent", "--multi-latent-attention --use-flash-attn", RING, 2, 1, ""),
    ("recomputed", FULL, "--context-parallel-kv-cache-policy half", 2, 1, ""),
    ("ring, further tokens", "--mtp-num-layers 1", RING, 2, 1, ""),
    ("ring, window", "--window-size 5,0 --qk-layernorm", RING, 2, 1, ""),
    ("ulysses, sink", "--softmax-type learnable", ULYSSES, 2, 1, ""),
    ("reset mask", "--reset-attention-mask --reset-position-ids --eod-mask-loss", "", 2, 1, ""),
    ("ring, swapped", "--swap-attention", RING, 2, 1, ""),
    ("ring, operators", f"{OPERATORS} --gradient-accumulation-fusion --use-fused-rotary-pos-emb", RING, 2, 1, ""),
    ("dp2", "", "--use-distributed-optimizer --overlap-grad-reduce", 2, 2, ""),
):
    TABLE[name] = Flags(
        given, f"{on} --context-parallel-size {ranks}", "context_parallel_algo", ranks * others, quick,
        # A token close to a tie chooses another expert.
        near=CLOSE._replace(first_norm=2.0**-9) if "ep2" in name else CLOSE, reference=others,
        before="swap_attention" if "swapped" in name else "",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("release", "name"),
    [
        pytest.param(release, name, marks=() if release in row.quick.split() else matrix.whole)
        for name, row in TABLE.items()
        for release in row.releases
    ],
)
def test_flags_turn_features_on_that_train_as_without_them(
    trainer: Callable[[str], Trainer], release: str, name: str, tmp_path: Path
) -> None:
    row = TABLE[name]
    given, its = [*NO_DROPOUT, *row.given.split()], trainer(release)
    before = {"before": row.before} if row.before else {}
    off = its.script_once(row.reference or row.ranks, given, compile=row.compiled, **before)
    on, status = reported(its, row.ranks, [*given, *row.on.split()], tmp_path, compile=row.compiled, **before)
    assert len(on.losses()) == 4
    assert {status[feature] for feature in row.applied.split()} <= {"applied"}
    if row.near is None:
        assert on.history() == off.history()
    else:
        assert fault(off.steps(), on.steps(), *row.near) == "" and on.history() != off.history()
    assert all(row.seen in on.log(rank) for rank in range(row.ranks))
    assert row.ranks == 1 or "mindspeed_lite: " not in on.log(1), "only rank 0 reports"


def reported(
    its: Trainer, ranks: int, flags: Sequence[str], folder: Path, steps: int = 4, **job: object
) -> tuple[Result, dict[str, str]]:
    """A training with every feature that is asked for, and how each is by its report."""
    report = folder / "report.json"
    given = [*flags, "--mindspeed-lite-strict", "--mindspeed-lite-report", str(report)]
    result = its.script(ranks, given, steps, **job).check()
    return result, {each["feature"]: each["status"] for each in json.loads(report.read_text())["entries"]}


# Processes, flags, and the features among them that set arguments of Megatron's before it validates them.
SETTING: dict[str, tuple[int, str, str]] = {
    "recomputation": (
        2, "--pipeline-model-parallel-size 2 --recompute-in-bubble --pipeline-schedule-max-live 1 --use-flash-attn",
        "recompute_in_bubble use_flash_attn",
    ),
    # As many experts as ranks: by the sizes that it has set itself, --moe-tp-extend-ep would not apply.
    "experts": (
        2, "--tensor-model-parallel-size 2 --sequence-parallel --num-experts 2 --moe-router-topk 2 --moe-tp-extend-ep "
        "--moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion "
        "--moe-shared-expert-intermediate-size 64 --moe-alltoall-overlap-comm --gradient-accumulation-fusion "
        "--masked-softmax-fusion --use-fused-rotary-pos-emb --tp-comm-overlap --coc-parallel-num 2",
        "gradient_accumulation_fusion masked_softmax_fusion moe_alltoall_overlap_comm moe_grouped_gemm "
        "moe_permute_fusion moe_router_fusion moe_tp_extend_ep use_ascend_coc use_fused_rotary_pos_emb",
    ),
    "two micro-batches": (2, f"{EP2} --moe-fb-overlap --gradient-accumulation-fusion", "moe_fb_overlap"),
    "V": (2, "--pipeline-model-parallel-size 2 --num-layers 4 --schedules-method dualpipev", "schedules_method"),
    "host": (2, "--tensor-model-parallel-size 2 --reduce-host-syncs", "reduce_host_syncs"),
    "context": (2, f"--context-parallel-size 2 {RING}", "context_parallel_algo"),
}  # fmt: skip


@pytest.mark.parametrize("row", matrix.only(["recomputation", "experts"], [*SETTING]))
def test_features_that_set_arguments_are_in_force(trainer: Callable[[str], Trainer], row: str, tmp_path: Path) -> None:
    ranks, flags, features = SETTING[row]
    result, status = reported(trainer(NEW), ranks, [*NO_DROPOUT, *flags.split()], tmp_path, 2)
    assert len(result.losses()) == 2 and all(0 < loss < 7 for loss in result.losses())
    assert {status[name] for name in features.split()} == {"applied"}


def test_every_feature_that_sets_arguments_is_among_them() -> None:
    found = {name for *_, features in SETTING.values() for name in features.split()}
    assert found == {each.name for each in runtime.catalogue() if each.arguments is not None}


def test_a_skipped_feature_leaves_the_order_to_megatron(trainer: Callable[[str], Trainer]) -> None:
    """Neither the V nor recomputation as steps applies to this model: it trains on as without the flags."""
    given = [*"--num-layers 2 --pipeline-model-parallel-size 2 --gradient-accumulation-fusion".split(), *NO_DROPOUT]
    off = trainer(NEW).script(2, given, 2).check()
    on = trainer(NEW).script(2, [*given, "--schedules-method", "dualpipev", "--recompute-in-advance"], 2).check()
    assert on.history() == off.history() and len(on.losses()) == 2
    assert on.log().count("the feature whose order it would execute was skipped") == 1


@pytest.mark.parametrize("release", matrix.only([NEW], checkouts.WITH_TRAINING))
def test_megatrons_own_defaults_train_with_fused_sums_and_softmax(
    trainer: Callable[[str], Trainer], release: str, tmp_path: Path
) -> None:
    """LayerNorm, GELU, biases, dropout, attention that makes scores; and the fusions' warm-up before training."""
    own = ("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear")
    model = [SCRIPT, *(word for word in MODEL if word not in own), "--train-iters", "4"]
    report = tmp_path / "report.json"
    flags = ["--bias-dropout-fusion", "--masked-softmax-fusion", "--mindspeed-lite-strict", "--mindspeed-lite-report"]

    def losses(*more: str) -> list[float]:
        return trainer(release).run(entry="script", arm="adaptor", argv=[*model, *more]).check().losses()

    # Weights from the default generator, which the warm-up draws from.
    same_draws = (*NO_DROPOUT, "--use-cpu-initialization")
    off, on = losses(*same_draws), losses(*same_draws, *flags, str(report))
    status = {entry["feature"]: entry["status"] for entry in json.loads(report.read_text())["entries"]}
    assert status["bias_dropout_fusion"] == status["masked_softmax_fusion"] == "applied" and on != off
    assert abs(on[0] - off[0]) <= 2.0**-11 * off[0]
    for a, b in zip(off, on, strict=True):
        assert abs(a - b) <= DRIFT.loss * abs(a)
    drawn = losses(*flags, str(report))
    assert len(drawn) == 4 and drawn != on and abs(drawn[-1] - on[-1]) < 0.1 * on[-1]


@pytest.mark.parametrize("release", matrix.only([NEW], checkouts.WITH_TRAINING))
def test_without_a_compiler_it_trains_as_with_functions_that_are_not_compiled(
    trainer: Callable[[str], Trainer], release: str, tmp_path: Path
) -> None:
    """Megatron has compiled its functions by the time it reads --disable-jit-fuser."""
    environment = {"PATH": str(tmp_path), "CXX": ""}
    result = trainer(release).script(1, NO_DROPOUT, compile=True, env=environment).check()
    assert "--disable-jit-fuser set" in result.log()
    eager = trainer(release).script(1, NO_DROPOUT).check()
    assert len(result.losses()) == 4 and result.history() == eager.history()
