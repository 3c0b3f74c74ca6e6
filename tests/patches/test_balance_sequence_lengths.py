"""`--balance-sequence-lengths` on real data sets and loaders of Megatron: lengths, places, reasons, fallbacks."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

import mindspeed_lite
from mindspeed_lite.parallel.balance.lengths import StepOrder, attention_pairs
from mindspeed_lite.patches import balance_sequence_lengths as patch
from tests.harness import document_data
from tests.harness.processes import forked

SEQUENCE, SAMPLES = 32, 64
ARGS = {
    "dataloader_inter_document_masking": True,
    "dataloader_type": "single",
    "data_parallel_size": 2,
    "global_batch_size": 16,
    "micro_batch_size": 2,
    "expert_model_parallel_size": 1,
    "hybrid_context_parallel": False,
    "num_workers": 0,
    "full_validation": False,
    "exit_signal_handler": False,
}


def datasets(tmp_path, kind, samples=SAMPLES, **config):
    """Training and validation sets of Megatron's builder: "one" of files, a "blend" of two, or a "mock" one."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset

    lengths = [document_data.GeneratedLengths(4, 1.2, SEQUENCE, seed) for seed in (0, 1)]
    prefixes = [document_data.write(tmp_path / f"set{each.seed}", 900, each) for each in lengths]
    tokenizer = SimpleNamespace(eod=255, pad=-1, vocab_size=256, unique_identifiers={"class": "none"})
    found = GPTDatasetConfig(
        random_seed=3,
        sequence_length=SEQUENCE,
        blend={"one": (prefixes[:1], None), "blend": (prefixes, [0.3, 0.7]), "mock": None}[kind],
        split="90,10,0",
        path_to_cache=str(tmp_path / "cache"),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        **{"inter_document_masking": True, **config},
    )
    dataset = MockGPTDataset if kind == "mock" else GPTDataset
    return BlendedMegatronDatasetBuilder(dataset, [samples, 16, 0], lambda: True, found).build()[:2]


def lengths_of(sample):
    ends = sample["cu_seqlens"]
    return [each for each in (ends[1:] - ends[:-1]).tolist() if each]


@pytest.mark.parametrize("kind", ["one", "blend", "mock"])
@forked("megatron")
def test_lengths_are_those_of_the_samples(tmp_path, kind):
    train, _ = datasets(tmp_path, kind)
    several = 0
    for index in range(SAMPLES):
        found = [each for each in patch.document_lengths(train, index) if each]
        assert found == lengths_of(train[index]) and sum(found) == SEQUENCE
        several += len(found) > 2
    assert several > SAMPLES / 2 or kind == "mock"


@forked("megatron")
def test_indices_that_are_read_late_are_read_first(tmp_path):
    first, _ = datasets(tmp_path, "blend")  # writes the cache
    late, _ = datasets(tmp_path, "blend", defer_npy_index_mmap=True)
    assert late.dataset_index is None
    assert patch.document_lengths(late, 5) == patch.document_lengths(first, 5)


def loader_of(dataset, rank, consumed=0, workers=0, **args):
    """Megatron's loader of a rank."""
    from megatron.core import mpu
    from megatron.training import global_vars
    from megatron.training.datasets import data_samplers

    given = {**ARGS, "num_workers": workers, **args}
    global_vars.unset_global_variables()
    global_vars.set_args(SimpleNamespace(**given))
    mpu._MPU_DATA_PARALLEL_RANK, mpu._MPU_DATA_PARALLEL_WORLD_SIZE = rank, given["data_parallel_size"]
    return data_samplers.build_pretraining_data_loader(dataset, consumed)


def micro_batches(dataset, rank, **more):
    return read(loader_of(dataset, rank, **more))


def read(loader):
    """Tokens and document lengths of the micro-batches that a loader gives, in order."""
    found = []
    for batch in loader:
        rows = zip(batch["tokens"].tolist(), batch["cu_seqlens"], strict=True)
        found.append([(tuple(tokens), attention_pairs(lengths_of({"cu_seqlens": ends}))) for tokens, ends in rows])
    return found


def of_ranks(dataset, **more):
    """[steps][ranks][micro-batches of a step]"""
    ranks = [micro_batches(dataset, rank, **more) for rank in (0, 1)]
    each = ARGS["global_batch_size"] // (2 * more.get("micro_batch_size", ARGS["micro_batch_size"]))
    return [[rank[start : start + each] for rank in ranks] for start in range(0, len(ranks[0]), each)]


def on(**args):
    given = SimpleNamespace(**{**ARGS, **args})
    return mindspeed_lite.enabled(host_args=given, balance_sequence_lengths=True, strict=True)


def joined(ranks):
    return [each for rank in ranks for each in rank]


def cost(micro_batches):
    return sum(pairs for each in micro_batches for _, pairs in each)


@pytest.mark.parametrize("size", [1, 2])
@forked("megatron")
def test_a_step_has_the_same_micro_batches_and_ranks_equal_costs(tmp_path, size):
    train, _ = datasets(tmp_path, "blend")
    off = of_ranks(train, micro_batch_size=size)
    with on(micro_batch_size=size):
        found = of_ranks(train, micro_batch_size=size)
    assert len(found) == len(off) == SAMPLES // 16 and found != off
    worse = 0.0
    for before, after in zip(off, found, strict=True):
        assert sorted(joined(before)) == sorted(joined(after))
        costs = [cost([each]) for each in joined(before)]
        # No order is below the mean, nor below the most expensive with the cheapest others.
        bound = max(sum(costs) / 2, max(costs) + sum(sorted(costs)[: len(costs) // 2 - 1]))
        slowest = max(map(cost, after))
        assert slowest <= max(map(cost, before)) and slowest <= 1.1 * bound
        worse += max(map(cost, before)) / slowest
    assert worse / len(off) > 1.05
    # Everything is as it was behind the feature.
    assert of_ranks(train, micro_batch_size=size) == off


@forked("megatron")
def test_with_experts_over_ranks_micro_batches_of_one_time_are_alike(tmp_path):
    train, _ = datasets(tmp_path, "one")
    with on(expert_model_parallel_size=2):
        for step in of_ranks(train):
            costs = sorted((cost([each]) for each in joined(step)), reverse=True)
            assert sum(max(cost([a]), cost([b])) for a, b in zip(*step, strict=True)) == sum(costs[::2])


@forked("megatron")
def test_a_training_that_resumes_goes_on_and_workers_change_nothing(tmp_path):
    train, _ = datasets(tmp_path, "blend")
    with on():
        whole = of_ranks(train)
        assert of_ranks(train, consumed=32) == whole[2:]
        assert of_ranks(train, workers=2) == whole


@forked("megatron")
def test_a_loader_keeps_its_order_when_the_feature_is_turned_off(tmp_path):
    train, _ = datasets(tmp_path, "one")
    with on():
        whole = micro_batches(train, 0)
        loader = loader_of(train, 0)
    assert read(loader) == whole != micro_batches(train, 0)


@forked("megatron")
def test_other_sets_stay_as_they_are(tmp_path):
    train, valid = datasets(tmp_path, "one")
    evaluated = {"eval_micro_batch_size": 2, "eval_global_batch_size": 16}
    off = micro_batches(valid, 1, **evaluated), micro_batches(train, 1)
    with on():
        assert micro_batches(valid, 1, **evaluated) == off[0]

    class Own(type(train)):
        def __getitem__(self, index):
            return super().__getitem__(index)

    train.__class__ = Own
    with mindspeed_lite.enabled(host_args=SimpleNamespace(**ARGS), balance_sequence_lengths=True):
        assert micro_batches(train, 1) == off[1]
        assert ["lengths in a Own are not known" in each.reason for each in mindspeed_lite.report().fallbacks] == [True]
    with mindspeed_lite.enabled(balance_sequence_lengths=True):
        assert micro_batches(train, 1) == off[1]
        assert "arguments are not known" in mindspeed_lite.report().fallbacks[0].reason


def test_the_proxy_shows_what_it_holds_and_survives_a_spawned_worker():
    rows = [10, 20, 30, 40]
    order = StepOrder(0, 4, 4, 1, 2, rows.__getitem__)
    found = pickle.loads(pickle.dumps(patch.BalancedDataset(rows, order)))
    assert len(found) == 4 and sorted(found[each] for each in range(4)) == rows
    assert found.count(10) == 1 and not hasattr(found, "__getitems__") and not hasattr(found, "split")
