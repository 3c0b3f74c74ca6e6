"""`--grad-reduce-compression` in Megatron's DDP: what is compressed, NaN, checkpoints of error feedback, fallbacks."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mindspeed_lite
from mindspeed_lite.parallel.block_codes import BLOCK
from tests.harness.processes import forked, on_ranks

NAME = "grad_reduce_compression"
SIZE = 64


def _start(rank: int, ranks: int, folder: Any, local: int = 0) -> None:
    from megatron.core import parallel_state

    from mindspeed_lite import platform

    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if local:
        os.environ["LOCAL_WORLD_SIZE"] = str(local)
    platform.activate()
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel()


def _model(scatters: bool = False, size: int = SIZE) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(1)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    return DistributedDataParallel(
        config,
        DistributedDataParallelConfig(use_distributed_optimizer=scatters, grad_reduce_in_fp32=True),
        torch.nn.Linear(size, size, bias=False),
    )


def _gradient(rank: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(SIZE * SIZE, generator=generator)


def _whole() -> torch.Tensor:
    """Whole numbers that int8 holds exactly, of all ranks alike: so are their sums."""
    whole = torch.randint(-126, 127, (SIZE * SIZE,), generator=torch.Generator().manual_seed(1)).float()
    whole[::BLOCK] = 127
    return whole


def _reduced(
    model: Any, rank: int, step: int = 0, changed: float | None = None, own: torch.Tensor | None = None
) -> torch.Tensor:
    gradient = model.bucket_groups[0].buckets[0].grad_data
    gradient[: SIZE * SIZE] = _gradient(rank, step) if own is None else own
    if changed is not None and rank == 1:
        gradient[5] = changed
    model.finish_grad_sync()
    return gradient[: SIZE * SIZE].clone()


def _mean(ranks: int, step: int = 0) -> torch.Tensor:
    return sum(_gradient(rank, step) for rank in range(ranks)) / ranks  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("ranks", "local", "scope", "nearness"),
    [
        (2, 0, "auto", "rounded"),
        (2, 2, "auto", "rounded"),
        (2, 2, "between-nodes", "exact"),
        (4, 2, "auto", "rounded"),
        (4, 2, "all", "rounded"),
        (3, 2, "auto", "rounded"),
        (3, 2, "between-nodes", "fallback"),
    ],
)
@forked("megatron")
def test_what_is_compressed(tmp_path, ranks, local, scope, nearness):
    def body(rank):
        _start(rank, ranks, tmp_path, local)
        off = _reduced(_model(), rank)
        torch.testing.assert_close(off, _mean(ranks), rtol=1e-5, atol=1e-6)
        with mindspeed_lite.enabled(**{NAME: "int8", f"{NAME}_scope": scope}):
            on = _reduced(_model(), rank)
            if ranks != 3:
                exact = _model()
                for _ in range(2):
                    assert torch.equal(_reduced(exact, rank, own=_whole()), _whole()), "nothing is rounded"
            fallbacks = [each.reason for each in mindspeed_lite.report().fallbacks]
        assert torch.equal(on, off) == (nearness != "rounded")
        assert (on - off).abs().max() < 0.05
        assert bool(fallbacks) == (nearness == "fallback") and all("not equally many" in each for each in fallbacks)

    on_ranks(ranks, body)


@pytest.mark.parametrize("scatters", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@forked("megatron")
def test_what_is_not_finite_is_seen_once(tmp_path, bad, scatters):
    def body(rank):
        _start(rank, 2, tmp_path)
        with mindspeed_lite.enabled(**{NAME: "int8", "strict": True}):
            model = _model(scatters)
            found = _reduced(model, rank, 0, bad)
            if not scatters or rank == 0:  # rank 0 owns the first half
                assert not found[5].isfinite()
            assert found[SIZE * SIZE // 2 :].isfinite().all()
            own = slice(0, SIZE * SIZE // 2) if rank == 0 else slice(SIZE * SIZE // 2, None)
            torch.testing.assert_close(_reduced(model, rank, 1)[own], _mean(2, 1)[own], rtol=0, atol=0.1)

    on_ranks(2, body)


@forked("megatron")
def test_gradients_summed_in_another_precision_are_left_to_megatron(tmp_path):
    def body(rank):
        _start(rank, 2, tmp_path)
        off = _reduced(_model(), rank)
        with mindspeed_lite.enabled(**{NAME: "int8"}):
            model = _model()
            (parameter,) = model.parameters()
            model.bucket_groups[0].buckets[0].params_with_extra_main_grads = [parameter]
            assert torch.equal(_reduced(model, rank), off)
            assert "another precision" in mindspeed_lite.report().fallbacks[0].reason

    on_ranks(2, body)


def _checkpoint(model: Any, folder: Any, action: str) -> None:
    from megatron.core import dist_checkpointing

    state = model.module.state_dict()
    sharded = {
        "weight": dist_checkpointing.ShardedTensor.from_rank_offsets(
            "weight", state["weight"], replica_id=dist.get_rank()
        )
    }
    getattr(dist_checkpointing, action)(sharded, str(folder))


@forked("megatron")
def test_error_feedback_goes_on_where_the_checkpoint_has_it(tmp_path):
    """The second step after a checkpoint: as without it, or with error feedback from zero and a notice."""

    def body(rank):
        _start(rank, 2, tmp_path)
        folder = tmp_path / "checkpoint"
        if rank == 0:
            folder.mkdir()
        dist.barrier()
        with mindspeed_lite.enabled(**{NAME: "int8", "strict": True}):
            model = _model()
            first = _reduced(model, rank, 0)
            _checkpoint(model, folder, "save")
            second = _reduced(model, rank, 0)
            assert not torch.equal(first, second), "the same gradient, and what the first message lost"
        exact = _reduced(model, rank, 0)
        with mindspeed_lite.enabled(**{NAME: "int8", "strict": True}):
            assert torch.equal(_reduced(model, rank, 0), first) and not torch.equal(exact, first), "on again"
        model = None
        gc.collect()
        file = folder / f"{NAME}_{rank:05d}.pt"
        notices = {}
        for case in ("whole", "other size", "missing"):
            if case == "missing":
                file.unlink()
            with mindspeed_lite.enabled(**{NAME: "int8", "strict": True}):
                if case == "other size":
                    states = torch.load(file)
                    for each in states.values():
                        each["residuals"] = [[tensor[:, 1:] for tensor in one] for one in each["residuals"]]
                    torch.save(states, file)
                model = _model()
                _checkpoint(model, folder, "load")
                assert torch.equal(_reduced(model, rank, 0), second if case == "whole" else first), case
                model = None
                gc.collect()
                notices[case] = [each for each in mindspeed_lite.report().notices if NAME in each]
        assert notices["whole"] == [] and "starts at zero" in notices["missing"][0]
        assert "buckets differ" in notices["other size"][0]

    on_ranks(2, body)
