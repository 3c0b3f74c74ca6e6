"""`--use-fused-embedding` in real Megatron: to the bit what the layer gives without it, and a gradient in rows."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

import mindspeed_lite
from mindspeed_lite.patches import use_fused_embedding as patch
from tests.harness.compare import Sizes, error
from tests.harness.processes import forked
from tests.patches.linear_layers import on_tensor_ranks


def embedding_of(sequence_parallel=False, ranks=2, dtype=torch.bfloat16, **fields):
    from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        tensor_model_parallel_size=ranks,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        params_dtype=dtype,
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
    def body(rank):
        embedding = embedding_of(sequence_parallel)
        ids = torch.randint(0, 32, (3, 6), generator=torch.Generator().manual_seed(4))
        off, gradient, names = run(embedding, ids)
        assert [name for name in names if "index_put" in name]
        with mindspeed_lite.enabled(use_fused_embedding=True):
            on, same, names = run(embedding, ids)
            (said,) = mindspeed_lite.report().fallbacks
            assert "no main gradient" in said.reason
        assert torch.equal(on, off) and torch.equal(same, gradient)
        assert not [name for name in names if "index_put" in name]

    on_tensor_ranks(2, body)


def reduced(embedding, ids, **ddp):
    """The main gradient that Megatron's DistributedDataParallel has after two micro-batches, and what was made."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    model = DistributedDataParallel(embedding.config, DistributedDataParallelConfig(**ddp), embedding)
    with Sizes() as sizes:
        for number, batch in enumerate(ids):
            with model.no_sync() if number + 1 < len(ids) else contextlib.nullcontext():
                out = model(batch)
                out.backward(torch.arange(1.0, out.numel() + 1).sin().view(out.shape).to(out.dtype))
                assert embedding.weight.grad is None, "the hook has taken it"
        model.finish_grad_sync()
    return embedding.weight.main_grad.clone(), sizes


@pytest.mark.parametrize(
    ("ranks", "ddp"),
    [
        (1, {"grad_reduce_in_fp32": True}),
        (1, {"grad_reduce_in_fp32": True, "overlap_grad_reduce": True}),
        (1, {"grad_reduce_in_fp32": False}),
        (2, {"grad_reduce_in_fp32": True, "overlap_grad_reduce": True}),
    ],
)
@forked("megatron")
def test_megatrons_hook_adds_rows_to_the_main_gradient(ranks, ddp):
    def body(rank):
        ids = torch.randint(0, 32, (2, 3, 6), generator=torch.Generator().manual_seed(4))
        off, many = reduced(embedding_of(ranks=ranks), ids, **ddp)
        exact, _ = reduced(embedding_of(ranks=ranks, dtype=torch.float64), ids)
        with mindspeed_lite.enabled(use_fused_embedding=True, strict=True):
            on, few = reduced(embedding_of(ranks=ranks), ids, **ddp)
            assert mindspeed_lite.report().fallbacks == []
        assert any("embedding_dense_backward" in name for name in many.names)
        assert not any("embedding_dense_backward" in name for name in few.names)
        assert on.dtype == off.dtype and 0 < error(off, exact) < 0.01
        # Where the main gradient has 16 bits, each row is rounded as often as in the dense gradient.
        allowed = 2.0 if off.dtype == torch.bfloat16 else 1.0
        assert error(on, exact) <= allowed * error(off, exact)

    on_tensor_ranks(ranks, body)


@pytest.mark.parametrize("shared", ["output layer", "second lookup"])
@forked("megatron")
def test_a_weight_that_is_used_twice_gets_both_gradients(shared):
    def body(rank):
        ids = torch.randint(0, 32, (2, 3, 6), generator=torch.Generator().manual_seed(4))

        class Twice(torch.nn.Module):
            def __init__(self, dtype=torch.bfloat16):
                super().__init__()
                self.embedding = embedding_of(ranks=1, dtype=dtype)
                self.config, self.weight = self.embedding.config, self.embedding.weight

            def forward(self, ids):
                hidden = torch.tanh(self.embedding(ids))
                if shared == "second lookup":
                    return hidden * self.embedding(ids.roll(1, -1))
                return torch.nn.functional.linear(hidden, self.weight)

        off, _ = reduced(Twice(), ids)
        exact, _ = reduced(Twice(torch.float64), ids)
        with mindspeed_lite.enabled(use_fused_embedding=True, strict=True):
            on, sizes = reduced(Twice(), ids)
        assert not any("embedding_dense_backward" in name for name in sizes.names)
        assert error(on, exact) <= 1.1 * error(off, exact) and error(off, exact) < 0.02

    on_tensor_ranks(1, body)


@forked("megatron")
def test_where_nobody_adds_rows_the_gradient_stays_dense_and_the_reason_is_said():
    def body(rank):
        ids = torch.randint(0, 32, (3, 6), generator=torch.Generator().manual_seed(4))

        def said(change, **fields):
            embedding = embedding_of(ranks=1, **fields)
            embedding.weight.main_grad = torch.zeros(embedding.weight.shape)
            change(embedding)
            with mindspeed_lite.enabled(use_fused_embedding=True):
                _, gradient, _ = run(embedding, ids)
                return gradient.is_sparse, [each.reason for each in mindspeed_lite.report().fallbacks]

        assert said(lambda layer: None) == (True, [])
        reasons = {}
        for name, change in {
            "main": lambda layer: delattr(layer.weight, "main_grad"),
            "fsdp": lambda layer: setattr(layer.weight, "__fsdp_param__", True),
        }.items():
            sparse, (reasons[name],) = said(change)
            assert not sparse
        assert "no main gradient" in reasons["main"] and reasons["fsdp"] == reasons["main"]

        frozen = embedding_of(ranks=1)
        frozen.weight.requires_grad_(False)
        with mindspeed_lite.enabled(use_fused_embedding=True, strict=True), torch.no_grad():
            frozen(ids), embedding_of(ranks=1)(ids)
            assert mindspeed_lite.report().fallbacks == []
            with pytest.raises(IndexError):
                layer = embedding_of(ranks=1)
                layer.weight.main_grad = torch.zeros(layer.weight.shape)
                layer(ids + 32)

    on_tensor_ranks(1, body)


@forked("megatron")
def test_deterministic_mode_is_left_to_megatron():
    def body(rank):
        ids = torch.randint(0, 32, (3, 6), generator=torch.Generator().manual_seed(4))
        deterministic = embedding_of(deterministic_mode=True)
        with mindspeed_lite.enabled(use_fused_embedding=True):
            _, _, names = run(deterministic, ids)
            (said,) = mindspeed_lite.report().fallbacks
        assert [name for name in names if "index_put" in name] and "deterministic mode" in said.reason

    on_tensor_ranks(2, body)


def test_what_is_recorded_as_a_cuda_graph_keeps_a_dense_gradient(monkeypatch):
    weight = SimpleNamespace(device=torch.device("cuda"), main_grad=torch.zeros(1))
    for recording, word in ((False, ""), (True, "CUDA graph")):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda answer=recording: answer)
        assert word in patch._dense_because(weight) and bool(patch._dense_because(weight)) is recording
    assert "npu" in patch._dense_because(SimpleNamespace(device=SimpleNamespace(type="npu")))
