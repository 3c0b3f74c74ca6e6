"""`--use-fused-embedding` in real Megatron: to the bit what the embedding layer gives without it."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist

import mindspeed_lite
from mindspeed_lite.engine import Context, Settings
from mindspeed_lite.patches import use_fused_embedding as patch
from tests.ops.compare import Sizes
from tests.platform.forked import forked, on_ranks

FEATURE = patch.FEATURE


def joined(rank, ranks, store):
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(ranks)


def embedding_of(sequence_parallel=False, ranks=2, **fields):
    from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        tensor_model_parallel_size=ranks,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        **fields,
    )
    torch.manual_seed(1)
    return VocabParallelEmbedding(
        32, 8, init_method=torch.nn.init.normal_, reduce_scatter_embeddings=sequence_parallel, config=config
    )


def run(embedding, ids):
    """Output, the weight's gradient, and the operations it took."""
    embedding.weight.grad = None
    with Sizes() as sizes:
        out = embedding(ids)
        out.backward(torch.arange(out.numel()).view(out.shape).to(out.dtype))
    return out.detach(), embedding.weight.grad, sizes.names


@pytest.mark.parametrize("sequence_parallel", [False, True])
@forked("megatron")
def test_bits_are_megatrons_and_no_index_is_assigned_to(sequence_parallel):
    store = tempfile.mkdtemp() + "/store"

    def body(rank):
        mindspeed_lite.enable()
        joined(rank, 2, dist.FileStore(store, 2))
        embedding = embedding_of(sequence_parallel)
        ids = torch.randint(0, 32, (3, 6), generator=torch.Generator().manual_seed(4))
        off, gradient, names = run(embedding, ids)
        assert [name for name in names if "index_put" in name]
        with mindspeed_lite.enabled(use_fused_embedding=True):
            on, same, names = run(embedding, ids)
        assert torch.equal(on, off) and torch.equal(same, gradient)
        assert not [name for name in names if "index_put" in name]

    on_ranks(2, body)


@forked("megatron")
def test_deterministic_mode_and_one_rank_are_left_to_megatron():
    store = tempfile.mkdtemp() + "/store"

    def body(rank):
        mindspeed_lite.enable()
        joined(rank, 2, dist.FileStore(store, 2))
        ids = torch.randint(0, 32, (3, 6), generator=torch.Generator().manual_seed(4))
        deterministic = embedding_of(deterministic_mode=True)
        with mindspeed_lite.enabled(use_fused_embedding=True):
            _, _, names = run(deterministic, ids)
            (said,) = mindspeed_lite.report().fallbacks
        assert [name for name in names if "index_put" in name] and "deterministic mode" in said.reason

    on_ranks(2, body)


def test_conditions_name_the_flag_that_is_in_the_way():
    def reasons(**host_args):
        return list(FEATURE.condition(Context(Settings({}), "cpu", {}, host_args)))

    assert reasons() == [] == reasons(tensor_model_parallel_size=2)
    (one,) = reasons(tensor_model_parallel_size=1)
    (deterministic,) = reasons(deterministic_mode=True)
    assert "--tensor-model-parallel-size is 1" in one and "--deterministic-mode" in deterministic


@forked("megatron")
def test_the_report_names_the_target_and_disable_restores_it():
    from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

    original = vars(VocabParallelEmbedding)["forward"]
    report = mindspeed_lite.enable(use_fused_embedding=True)
    entry = next(each for each in report.entries if each.feature == FEATURE.name)
    assert entry.status == "applied" and entry.numerics == "bitwise"
    assert [each.verified for each in entry.patches] == ["verified"]
    assert vars(VocabParallelEmbedding)["forward"] is not original
    assert mindspeed_lite.disable() == [] and vars(VocabParallelEmbedding)["forward"] is original
