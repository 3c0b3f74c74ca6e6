"""A training script on `megatron.training` with the one import line: no flag, no change; flags; resume after a kill."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_lite import runtime
from tests.harness import checkouts, matrix
from tests.harness.script_trainings import LAYOUTS, MODEL, NO_DROPOUT, SCRIPT, lm_losses, train
from tests.harness.training import Result, Trainer

# What a user without Transformer Engine and Apex has to know and type; the adaptor does it for them.
SPELLED_OUT = (
    "--transformer-impl local --no-rope-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm "
    "--no-masked-softmax-fusion"
).split()

# Where Megatron's fused functions are compiled, as they are for a user; it costs ten seconds a process. They are
# arithmetic on tensors: what the device layer and the hooks change is not in them, whatever the layout.
COMPILED = {("0.19.2", "single")}
EVERY = [(release, layout) for release in checkouts.WITH_TRAINING for layout in LAYOUTS]
MATRIX = matrix.only([("0.19.2", "tp2_sp")], EVERY)


def without_flags(trainer: Trainer, release: str, layout: str) -> Result:
    """The script with the adaptor line alone, which several tests look at."""
    nproc, flags = LAYOUTS[layout]
    argv = [SCRIPT, *MODEL, "--train-iters", "4", *NO_DROPOUT, *flags.split()]
    compiled = (release, layout) in COMPILED
    return trainer.once(entry="script", arm="adaptor", nproc=nproc, argv=argv, compile=compiled)


@pytest.mark.parametrize(("release", "layout"), MATRIX)
def test_no_flag_is_bitwise_the_device_layer_alone(
    trainer: Callable[[str], Trainer], release: str, layout: str
) -> None:
    nproc, flags = LAYOUTS[layout]
    arguments = [*NO_DROPOUT, *flags.split(), *SPELLED_OUT]
    compiled = (release, layout) in COMPILED
    device_only = train(trainer(release), "device", nproc, arguments, compile=compiled).check()
    adaptor = without_flags(trainer(release), release, layout)
    assert len(lm_losses(adaptor)) == 4
    assert adaptor.history() == device_only.history()
    assert "mindspeed_lite" not in device_only.log()
    assert "--transformer-impl local set" in adaptor.log()


@pytest.mark.parametrize(
    ("release", "layout"),
    matrix.only(
        [("0.17.1", "tp2_sp"), *COMPILED],
        [*((release, "tp2_sp") for release in checkouts.WITH_TRAINING), *sorted(COMPILED)],
    ),
)
def test_flags_turn_features_on_and_the_report_says_so(
    trainer: Callable[[str], Trainer], release: str, layout: str, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    flags = ["--use-fused-rmsnorm", "--use-flash-attn", "--mindspeed-lite-report", str(report)]
    nproc, arguments = LAYOUTS[layout]
    compiled = (release, layout) in COMPILED
    off = lm_losses(without_flags(trainer(release), release, layout))
    given = [*NO_DROPOUT, *arguments.split(), *flags]
    result = train(trainer(release), "adaptor", nproc, given, compile=compiled).check()
    on = lm_losses(result)
    assert on != off
    for a, b in zip(off, on, strict=True):
        assert abs(a - b) <= 2.0**-8 * abs(a)
    written = json.loads(report.read_text())
    status = {entry["feature"]: entry["status"] for entry in written["entries"]}
    assert status["use_fused_rmsnorm"] == status["use_flash_attn"] == "applied"
    assert "use_flash_attn" in result.log(0)
    assert nproc == 1 or "mindspeed_lite" not in result.log(1), "only rank 0 reports"


@pytest.mark.parametrize("release", matrix.only(["0.19.2"], checkouts.WITH_TRAINING))
def test_megatrons_own_defaults_train_with_fused_sums_and_softmax(
    trainer: Callable[[str], Trainer], release: str, tmp_path: Path
) -> None:
    """LayerNorm, GELU, biases, dropout, attention that makes scores; and the fusions' warm-up before training."""
    own = ("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear")
    model = [word for word in MODEL if word not in own]
    report = tmp_path / "report.json"
    flags = ["--bias-dropout-fusion", "--masked-softmax-fusion", "--mindspeed-lite-strict", "--mindspeed-lite-report"]

    def losses(arm: str, *more: str) -> list[float]:
        argv = [SCRIPT, *model, "--train-iters", "4", *more]
        return lm_losses(trainer(release).run(entry="script", arm=arm, nproc=1, argv=argv).check())

    # Weights from the default generator, which the warm-up draws from.
    drawn_alike = (*NO_DROPOUT, "--use-cpu-initialization")
    off = losses("adaptor", *drawn_alike)
    on = losses("adaptor", *drawn_alike, *flags, str(report))
    status = {entry["feature"]: entry["status"] for entry in json.loads(report.read_text())["entries"]}
    assert status["bias_dropout_fusion"] == status["masked_softmax_fusion"] == "applied" and on != off
    assert abs(on[0] - off[0]) <= 2.0**-11 * off[0]
    for a, b in zip(off, on, strict=True):
        assert abs(a - b) <= 2.0**-8 * abs(a)
    drawn = losses("adaptor", *flags, str(report))
    assert len(drawn) == 4 and drawn != on and abs(drawn[-1] - on[-1]) < 0.1 * on[-1]


@pytest.mark.parametrize("release", matrix.only(["0.19.2"], checkouts.WITH_TRAINING))
def test_without_a_compiler_it_trains_as_with_functions_that_are_not_compiled(
    trainer: Callable[[str], Trainer], release: str, tmp_path: Path
) -> None:
    """Megatron has compiled its functions by the time it reads --disable-jit-fuser."""
    argv = [SCRIPT, *MODEL, "--train-iters", "4", *NO_DROPOUT]
    job = dict(entry="script", arm="adaptor", nproc=1, compile=True, env={"PATH": str(tmp_path), "CXX": ""})
    result = trainer(release).run(argv=argv, **job).check()
    assert "--disable-jit-fuser set" in result.log()
    eager = trainer(release).run(entry="script", arm="adaptor", nproc=1, argv=argv).check()
    assert len(lm_losses(result)) == 4 and result.history() == eager.history()


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
    "two micro-batches": (2, LAYOUTS["ep2"][1] + " --moe-fb-overlap --gradient-accumulation-fusion", "moe_fb_overlap"),
    "V": (2, "--pipeline-model-parallel-size 2 --num-layers 4 --schedules-method dualpipev", "schedules_method"),
    "context": (2, "--context-parallel-size 2 --context-parallel-algo megatron_cp_algo", "context_parallel_algo"),
}  # fmt: skip


@pytest.mark.parametrize("row", matrix.only(["recomputation", "experts"], [*SETTING]))
def test_features_that_set_arguments_are_in_force(trainer: Callable[[str], Trainer], row: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    nproc, flags, features = SETTING[row]
    given = [*NO_DROPOUT, *flags.split(), "--mindspeed-lite-strict", "--mindspeed-lite-report", str(report)]
    losses = lm_losses(train(trainer("0.19.2"), "adaptor", nproc, given, 2).check())
    assert len(losses) == 2 and all(0 < loss < 7 for loss in losses)
    status = {entry["feature"]: entry["status"] for entry in json.loads(report.read_text())["entries"]}
    assert {status[name] for name in features.split()} == {"applied"}


def test_every_feature_that_sets_arguments_is_among_them() -> None:
    found = {name for *_, features in SETTING.values() for name in features.split()}
    assert found == {each.name for each in runtime.catalogue() if each.arguments is not None}


def test_memory_in_the_log_is_the_process(trainer: Callable[[str], Trainer]) -> None:
    log = without_flags(trainer("0.19.2"), "0.19.2", "tp2_sp").log()
    line = next(line for line in log.splitlines() if "memory (MB)" in line)
    allocated = float(line.partition("allocated: ")[2].split()[0])
    assert 200 < allocated < 4000, line


def _resumed(result: Result, uninterrupted: Result, first: int) -> None:
    """The resumed run's losses are the uninterrupted one's from iteration `first` on (counted from 1).

    The second line that Megatron logs after a resume averages two iterations, on every device, so it is left out.
    """
    expected, got = lm_losses(uninterrupted)[first - 1 :], lm_losses(result)
    assert len(got) == len(expected) > 2
    assert [got[0], *got[2:]] == [expected[0], *expected[2:]]


CHECKPOINTED = [
    "--use-distributed-optimizer",
    "--ckpt-format",
    "torch_dist",
    "--save-interval",
    "2",
    "--num-workers",
    "2",
    "--hidden-dropout",
    "0.1",
    "--attention-dropout",
    "0.1",
]


@matrix.whole
@pytest.mark.parametrize(
    ("release", "mode"),
    [("0.19.2", ["--async-save"]), ("0.17.1", [])],
    ids=["0.19.2-async", "0.17.1-sync"],
)
def test_a_killed_run_resumes_on_the_same_loss_curve(
    trainer: Callable[[str], Trainer], release: str, mode: list[str], tmp_path: Path
) -> None:
    """Two data-parallel ranks, dropout, data workers: killed in training, resumed, killed in saving, resumed."""
    steps = 10
    whole = train(
        trainer(release), "adaptor", 2, [*CHECKPOINTED, *mode, "--save", str(tmp_path / "whole")], steps
    ).check()
    place = tmp_path / "killed"
    arguments = [*CHECKPOINTED, *mode, "--save", str(place), "--load", str(place)]

    # The third line of the log comes after the checkpoint of iteration 2 has been scheduled.
    killed = train(trainer(release), "adaptor", 2, arguments, steps, kill_when={"log": "iteration        5/"})
    assert killed.codes == [-9, -9]
    saved = int((place / "latest_checkpointed_iteration.txt").read_text())
    assert saved in (2, 4)

    # A checkpoint's folder exists from the start of its saving, the tracker names it at the end.
    killed = train(
        trainer(release),
        "adaptor",
        2,
        arguments,
        steps,
        kill_when={"path": str(place / f"iter_{saved + 2:07d}")},
    )
    assert killed.codes == [-9, -9]
    assert int((place / "latest_checkpointed_iteration.txt").read_text()) == saved, "it was killed after saving"

    resumed = train(trainer(release), "adaptor", 2, arguments, steps).check()
    _resumed(resumed, whole, saved + 1)


def test_checkpoints_are_interchangeable_with_off(trainer: Callable[[str], Trainer], tmp_path: Path) -> None:
    """Written with the features on it loads with them off, and the reverse."""
    features = ["--use-fused-rmsnorm", "--use-flash-attn", "--use-fused-adamw"]
    # The second in the format that may be loaded by another number of ranks.
    for writer, reader, format in ((features, [], []), ([], features, ["--dist-ckpt-optim-fully-reshardable"])):
        place = tmp_path / ("on" if writer else "off")
        base = [*NO_DROPOUT, "--save", str(place), "--save-interval", "3", "--use-distributed-optimizer", *format]
        written = train(trainer("0.19.2"), "adaptor", 1, [*base, *writer, "--exit-interval", "3"], 6).check()
        read = train(trainer("0.19.2"), "adaptor", 1, [*base, *reader, "--load", str(place)], 6).check()
        whole = train(trainer("0.19.2"), "adaptor", 1, [*NO_DROPOUT, *reader], 6).check()
        assert "successfully loaded checkpoint" in read.log()
        assert lm_losses(written)[0] > lm_losses(read)[0] > lm_losses(read)[-1]
        assert abs(lm_losses(read)[-1] - lm_losses(whole)[-1]) < 0.05
