"""Traced layers beside those that `planner` lists by hand: parameters, saved bytes, products and messages."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mindspeed_lite.dryrun import pieces
from mindspeed_lite.dryrun.launch import TrainingLaunch
from mindspeed_lite.planner import TrainingConfig, devices, layer_work, ranks, read, seconds
from mindspeed_lite.planner.choice import ModelPieces, TraceRequest, TracingError
from mindspeed_lite.planner.layer_work import PartWork
from mindspeed_lite.planner.published import PublishedDevice
from tests.harness import matrix
from tests.harness.checkouts import ROOT
from tests.harness.counted_trainings import TRAININGS

SCRIPT = str(ROOT / "examples" / "pretrain_gpt.py")
DEVICE = PublishedDevice(*devices.named("h100"))
KEPT = ("tp2 sp, on",)
# Dense, grouped queries, latent attention, experts, recomputation of all and of parts, context parallelism, pipelines.
EVERY = (
    *KEPT, "gpt2", "dense, gives up", "recomputed", "partly recomputed", "grouped queries", "ep2", "ep2, on",
    "ep2, rows given up", "tp2 pp2 ep2, on", "cp2, an algorithm each", "cp4, hybrid", "cp2 ep2",
    "latent, norms recomputed", "latent, tp2 sp, further tokens, on", "latent, cp2, ring", "stages by hand",
    "as DeepSeek-V3", "as DeepSeek-V3, recomputed", "pp2 vpp2 ep2, overlapped", "pp2, dualpipev", "ep2, padded",
)  # fmt: skip
# A ring's gradients travel in fp32, probabilities in the model's dtype, padded rows and each latent tensor are sent:
# the list has other bytes, and no auxiliary loss.
OTHER_BYTES = ("expert parallel", "context parallel")


@contextmanager
def tracing(name: str, device: str = "cpu") -> Iterator[tuple[TrainingConfig, pieces.Tracer]]:
    nproc, batch, words = TRAININGS[name]
    argv = [*words.split(), "--global-batch-size", str(batch)]
    launch = TrainingLaunch((SCRIPT, *argv), str(Path.cwd()), dict(os.environ), nproc, 8)
    with pieces.tracer(launch, device) as trace:
        yield read(argv, nproc, device), trace


def flops(work: PartWork) -> tuple[float, float]:
    return sum(each.flops for each in work.products), sum(each.flops for each in work.scores)


def sent(work: PartWork) -> Counter[tuple[str, str, float]]:
    return Counter(
        (each.message.kind, each.beside, each.message.bytes)
        for each in work.traffic
        for _ in range(each.forward + each.backward)
        if each.category not in OTHER_BYTES
    )


@pytest.mark.parametrize("name", matrix.only(KEPT, EVERY))
def test_traced_layers_are_those_listed_by_hand(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with tracing(name) as (training, trace):
        traced = ModelPieces(trace)
        for mine, hand in zip(ranks(training, traced), ranks(training), strict=True):
            assert mine.parameters.total == hand.parameters.total and mine.kept == hand.kept
            assert mine.categories == pytest.approx(hand.categories, rel=0.03)
        for number in range(training.num_layers):
            one = traced.layer(training, number, number, 0)
            has_experts = training.is_moe(number)
            work = layer_work.layer(training, has_experts, number)
            again = layer_work.recomputed(training, has_experts, number, number, 0)
            # A query sees itself: half of the scores and half a row more.
            assert flops(one.work) == pytest.approx(flops(work), rel=0.01)
            assert flops(one.again)[1] == pytest.approx(flops(again)[1], rel=0.01)
            mine, listed = (seconds.price(each, PartWork(), DEVICE, 2, 1.0) for each in (one.work, work))
            assert mine.weight_grad == pytest.approx(listed.weight_grad, rel=0.01)
            assert mine.forward["attention"] == pytest.approx(listed.forward["attention"], rel=0.05)
            assert mine.forward["vector"] > 0 < mine.input_grad["vector"]
            if not training.multi_latent_attention:
                assert flops(one.again)[0] == flops(again)[0]
                assert sent(one.work) == sent(work)
        assert not {*tmp_path.iterdir()}
        (failed,) = trace([TraceRequest(7, arguments=(("tensor_model_parallel_size", 7),))])
        assert isinstance(failed, TracingError) and "\n" not in str(failed)


@matrix.whole
@pytest.mark.parametrize("device", ["cuda", "npu"])
@pytest.mark.parametrize("name", ["gpt2", "grouped queries"])
def test_devices_keep_what_their_kernels_keep(name, device):
    with tracing(name, device) as (training, trace):
        (mine,), (hand,) = ranks(training, ModelPieces(trace)), ranks(training)
    assert mine.categories == pytest.approx(hand.categories, rel=0.01)
