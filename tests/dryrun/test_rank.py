"""A rank of a dry run takes what the real rank takes, and sends what it sends."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from mindspeed_lite.dryrun import masked_data, match, rank, worker
from mindspeed_lite.dryrun.launch import TrainingLaunch
from mindspeed_lite.engine.errors import OptionError
from tests.harness import frozen, matrix, recorded_script
from tests.harness.counted_trainings import DISTRIBUTED, LLAMA, MOE, ON, TRAININGS
from tests.harness.processes import clean_environment

RECORDED = str(Path(recorded_script.__file__))
FROZEN = Path(RECORDED).with_name("frozen_script.py")
CATEGORIES = ("parameters", "weights", "gradients", "optimizer", "host", "activations")
KEPT = ("ep2",)
EP4 = "--expert-model-parallel-size 4"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = f"--pipeline-model-parallel-size 2 {DISTRIBUTED}"
# Of more ranks: name -> (ranks, global batch size, arguments).
LARGE = {
    "ep4": (4, 8, f"{MOE} {ON} {EP4} {DISTRIBUTED} --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion"),
    "tp2 pp2 dp2": (8, 8, f"{LLAMA} {ON} {TP2} {PP2} --overlap-grad-reduce --overlap-param-gather"),
    "tp2 cp2 pp2": (8, 4, f"{LLAMA} {TP2} --context-parallel-size 2 {PP2} --recompute-activation-function"),
    "pp2 ep4": (8, 16, f"{MOE} {PP2} {EP4} --moe-alltoall-overlap-comm"),
    # Kinds of frozen models.
    "only MLPs": (2, 8, f"{LLAMA} {ON} {DISTRIBUTED}"),
    "LoRA": (2, 8, f"{LLAMA} --pipeline-model-parallel-size 2"),
}
LAYOUTS = {**TRAININGS, **LARGE}


def words(name):
    nproc, batch, flags = LAYOUTS[name]
    # A dry run replaces Transformer Engine's layers, a real run on a CPU does not.
    local = [] if "--transformer-impl" in flags else ["--transformer-impl", "local"]
    return nproc, [*flags.split(), *local, "--global-batch-size", str(batch), "--disable-jit-fuser"]


def without_places(messages):
    return [{key: value for key, value in each.items() if key != "where"} for each in messages]


@pytest.mark.parametrize("name", matrix.only(KEPT, [*LAYOUTS]))
def test_memory_and_messages_are_those_of_the_real_rank(tmp_path, name):
    nproc, argv = words(name)
    script = str(FROZEN if name in frozen.KINDS else recorded_script.SCRIPT)
    environment = {"RECORDED": str(tmp_path), "MINDSPEED_LITE_DEVICE": "cpu", "TORCH_COMPILE_DISABLE": "1",
                   "SCRIPT": script, "FROZEN": name}  # fmt: skip
    # In processes of their own, since forks of the harness have imported Megatron before messages are recorded.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    done = subprocess.run(
        [*command, RECORDED, *argv],
        cwd=tmp_path, capture_output=True, text=True, env={**clean_environment(), **environment}, timeout=600,
    )  # fmt: skip
    assert not done.returncode, done.stderr[-3000:]
    launch = TrainingLaunch(
        sys.executable, False, (script, *argv), str(tmp_path), {**os.environ, "FROZEN": name}, nproc, 8
    )
    ranks = rank.run(launch, 600)
    assert [each.error for each in ranks] == [""] * nproc, ranks[0].log_tail
    assert not match.problems({each.number: each.messages for each in ranks})
    for dry in ranks:
        real = json.loads((tmp_path / f"rank{dry.number}.json").read_text())
        for category in CATEGORIES:
            assert abs(dry.memory[category] - real["memory"][category]) <= 0.05 * real["memory"][category], category
        own = json.loads(json.dumps([asdict(each) for each in dry.messages[: dry.in_step]]))
        assert without_places(own) == without_places(real["messages"])


# Sizes of what a script of BERT reads arrive.
DIES = """
import os, signal
import torch, torch.distributed as dist
dist.init_process_group("gloo")
sizes = torch.arange(30) * (1 - dist.get_rank())
dist.broadcast(sizes, 0)
assert sizes.tolist() == [*range(30)]
if dist.get_rank() == 1:
    if not os.fork():
        raise SystemExit(7)
    os.wait()
    os.kill(os.getpid(), signal.SIGKILL)
found = [None, None]
dist.all_gather_object(found, dist.get_rank())
raise ValueError(found)
"""


def test_a_rank_that_dies_is_said_and_not_waited_for(tmp_path):
    (tmp_path / "dies.py").write_text(DIES)
    launch = TrainingLaunch(sys.executable, False, ("dies.py",), str(tmp_path), clean_environment(), 2, 8)
    waits, dies = rank.run(launch, 60)
    assert "ended by SIGKILL before the step did" in dies.error
    assert waits.error.startswith("ValueError: [0, 0]") and dies.ended_at < waits.ended_at


@pytest.mark.parametrize(
    "name, lengths",
    [
        ("T5", {"text_enc": 64, "text_dec": 40, "labels": 40, "loss_mask": 40, "enc_mask": 64, "dec_mask": 40}),
        ("BERT", {"text": 64, "types": 64, "labels": 64, "padding_mask": 64, "loss_mask": 64}),
    ],
)
def test_masked_data_needs_no_files(monkeypatch, name, lengths):
    masked = importlib.import_module("megatron.core.datasets.masked_dataset").MaskedWordPieceDatasetConfig
    builder = importlib.import_module("megatron.core.datasets.blended_megatron_dataset_builder")
    monkeypatch.setattr(masked, "__post_init__", masked.__post_init__)
    monkeypatch.setattr(builder.BlendedMegatronDatasetBuilder, "build", builder.BlendedMegatronDatasetBuilder.build)
    masked_data.install()
    module = importlib.import_module(f"megatron.core.datasets.{name.lower()}_dataset")
    own = {"T5": {"sequence_length_decoder": 40}, "BERT": {"classification_head": True}}
    config = getattr(module, f"{name}MaskedWordPieceDatasetConfig")(
        random_seed=1, sequence_length=64, split="1,0,0", tokenizer=argparse.Namespace(vocab_size=100),
        masking_probability=0.15, short_sequence_probability=0.1, masking_max_ngram=3, masking_do_full_word=True,
        masking_do_permutation=False, masking_use_longer_ngrams=False, masking_use_geometric_distribution=False,
        **own[name],
    )  # fmt: skip
    kind = getattr(module, f"{name}MaskedWordPieceDataset")
    train, *others = builder.BlendedMegatronDatasetBuilder(kind, [3, None, None], lambda: True, config).build()
    assert others == [None, None] and len(train) == 3
    assert {key: len(each) for key, each in train[2].items() if getattr(each, "ndim", 0)} == lengths


HANGS = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
while dist.get_rank() == 1:
    time.sleep(1)
flag = torch.ones(1, dtype=torch.int64)
dist.recv(flag, 1)
"""
# Rank 0 calls a collective that rank 1 does not; both go on to their end.
DIFFERS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(3))
dist.barrier()
"""


def test_what_hangs_is_told_from_what_waits(tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS)
    launch = TrainingLaunch(sys.executable, False, ("hangs.py",), str(tmp_path), clean_environment(), 2, 8)
    waits, hangs = rank.run(launch, 5)
    assert hangs.error.startswith("no step within 5 seconds [hangs.py:")
    assert waits.error.startswith("waits for rank 1: no step within 5 seconds [hangs.py:7]")


def test_a_deadlock_before_the_step_names_both_calls(tmp_path):
    (tmp_path / "differs.py").write_text(DIFFERS)
    launch = TrainingLaunch(sys.executable, False, ("differs.py",), str(tmp_path), clean_environment(), 2, 8)
    ranks = rank.run(launch, 60)
    assert [each.error for each in ranks] == [rank.NO_STEP] * 2
    (problem,) = match.problems({each.number: each.messages for each in ranks})
    assert "rank 0 calls all_reduce of 3 float32" in problem and "rank 1 calls barrier" in problem


def test_layers_of_a_missing_transformer_engine_are_replaced(monkeypatch):
    def replaced(**given):
        args = argparse.Namespace(use_flash_attn=False, use_fused_rmsnorm=False, **given)
        return args, worker.replace_transformer_engine(args)

    engine = {"transformer_impl": "transformer_engine", "fp8": "hybrid", "tp_comm_overlap": True}
    args, is_replaced = replaced(**engine)
    assert is_replaced and args.transformer_impl == "local" and args.use_flash_attn and args.use_fused_rmsnorm
    assert worker.leave_out(args, ("fp8", "fp4", "tp_comm_overlap")) == ["fp8", "tp_comm_overlap"]
    assert (args.fp8, args.tp_comm_overlap) == (None, False)
    assert not replaced(**engine, attention_backend="unfused")[0].use_flash_attn
    assert not replaced(transformer_impl="local")[1]
    monkeypatch.setattr(worker.importlib.util, "find_spec", lambda name: name)
    assert not replaced(**engine)[1]


@pytest.mark.parametrize("name", ["use_checkpoint_args", "use_megatron_fsdp", "use_torch_fsdp2"])
def test_what_a_dry_run_cannot_do_is_one_line(name):
    with pytest.raises(OptionError, match=f"--{name.replace('_', '-')}: a dry run (reads|has) no [^\n]*$"):
        worker.shorten(argparse.Namespace(**{name: True}), 2)


@pytest.mark.parametrize(("ranks", "decreases", "is_refused"), [
    (2, False, False), (3, False, True), (3, True, False), (8, False, True), (5, False, False),
])  # fmt: skip
def test_a_batch_that_megatron_refuses_is_one_line(ranks, decreases, is_refused):
    # Five ranks are no multiple of two stages, which Megatron says.
    args = argparse.Namespace(
        pipeline_model_parallel_size=2 if ranks == 5 else 1, tensor_model_parallel_size=1, context_parallel_size=1,
        micro_batch_size=2, global_batch_size=8, lr_decay_iters=1, train_iters=1,
        decrease_batch_size_if_needed=decreases,
    )  # fmt: skip
    refused = pytest.raises(OptionError, match=f"8 is no multiple of {2 * ranks}, .* on {ranks} data-par")
    with refused if is_refused else contextlib.nullcontext():
        worker.shorten(args, ranks)


def test_a_schedule_of_a_feature_that_does_not_apply_is_not_predicted():
    args = argparse.Namespace(schedules_method="dualpipev", pipeline_schedule="zb-h1")
    worker.forget_orders(args, [("schedules_method", "skipped", ""), ("pipeline_schedule", "applied", "")])
    assert (args.schedules_method, args.pipeline_schedule) == (None, "zb-h1")


@pytest.mark.parametrize(("batch", "own", "micro_batches"), [(48, "", 8), (40, "", None), (40, "interleaved", 8)])
def test_a_last_group_of_micro_batches_that_megatron_refuses_is_one_line(batch, own, micro_batches):
    args = argparse.Namespace(
        pipeline_model_parallel_size=4, tensor_model_parallel_size=1, context_parallel_size=1, micro_batch_size=1,
        global_batch_size=batch, num_virtual_stages_per_pipeline_rank=2, pipeline_schedule=own, lr_decay_iters=1,
        microbatch_group_size_per_vp_stage=6, train_iters=1,
    )  # fmt: skip
    refused = pytest.raises(OptionError, match=r"40 gives 20 micro-batches, 2 of them in a last group; .*of at least 4")
    with contextlib.nullcontext() if micro_batches else refused:
        assert worker.shorten(args, 8) == (micro_batches, batch // 2)
