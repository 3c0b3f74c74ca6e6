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


def _model(scatters: bool = False, dtype: torch.dtype = torch.float32, layers: int = 1) -> Any:
    """layers: each in a bucket group of its own."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(1)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    return DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=scatters, grad_reduce_in_fp32=True, overlap_grad_reduce=layers > 1, bucket_size=1
        ),
        torch.nn.Sequential(*(torch.nn.Linear(SIZE, SIZE, bias=False) for _ in range(layers))).to(dtype),
    )


def _optimizer(model: Any, **options: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    scatters = model.ddp_config.use_distributed_optimizer
    given = {"fp16": True, "params_dtype": torch.float16, "use_distributed_optimizer": scatters, **options}
    return get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, **given), [model])


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


def _own(gradient: torch.Tensor, rank: int, scatters: bool) -> torch.Tensor:
    return gradient.view(2, -1)[rank] if scatters else gradient


@pytest.mark.parametrize("scatters", [False, True])
@forked("megatron")
def test_error_feedback_follows_the_loss_scale_and_ends_with_a_skipped_step(tmp_path, scatters):
    """The loss scale doubles every step: the same bits as with a constant one, but for the scale."""

    def body(rank):
        _start(rank, 2, tmp_path)

        def step(model, optimizer, number, bad=1.0):
            scale = float(optimizer.get_loss_scale())
            model.zero_grad_buffer()
            gradient = scale * _gradient(rank, number)
            gradient[5] *= bad if rank else 1.0
            found = _own(_reduced(model, rank, own=gradient), rank, scatters)
            done = optimizer.step()[0]
            return found / scale, done

        def trained(*numbers, bad=None, **scaler):
            with mindspeed_lite.enabled(**{NAME: "int8", "strict": True}):
                model = _model(scatters, torch.float16)
                optimizer = _optimizer(model, **scaler)
                found = [step(model, optimizer, each, float("inf") if each == bad else 1.0) for each in numbers]
            return found, float(optimizer.get_loss_scale())

        constant, _ = trained(0, 1, 2, 3, 5, loss_scale=1024.0)
        fresh, _ = trained(5, loss_scale=1024.0)
        growing = {"initial_loss_scale": 1024.0, "loss_scale_window": 1, "hysteresis": 1}
        found, scale = trained(0, 1, 2, 3, 4, 5, bad=4, **growing)
        assert [done for _, done in found] == [True] * 4 + [False, True] and scale == 1024 * 2**4
        for number in range(4):
            assert torch.equal(found[number][0], constant[number][0]), f"step {number}"
        assert torch.equal(found[5][0], fresh[0][0]) and not torch.equal(found[5][0], constant[4][0])

    on_ranks(2, body)


@pytest.mark.parametrize("scatters", [False, True])
@forked("megatron")
def test_norm_and_clipping_see_the_reduced_values(tmp_path, scatters):
    def body(rank):
        _start(rank, 2, tmp_path)
        with mindspeed_lite.enabled(**{NAME: "int8", "strict": True}):
            model = _model(scatters)
            optimizer = _optimizer(model, fp16=False, params_dtype=torch.float32, clip_grad=0.5)
            gradient = torch.full((SIZE * SIZE,), 3e-3)  # rounds to 0 in blocks with a 1
            gradient[::BLOCK] = 1.0
            exact = float(gradient.norm())
            own = _own(_reduced(model, rank, own=gradient), rank, scatters)
            squares = own.double().square().sum()
            if scatters:
                dist.all_reduce(squares)
            _, norm, _ = optimizer.step()
            expected = float(squares.sqrt())
            assert norm == pytest.approx(expected, rel=1e-5) and abs(norm - exact) > 1e-4 * exact
            clipped = torch.cat([each.grad.view(-1) for each in optimizer.get_parameters()])
            torch.testing.assert_close(clipped, own * 0.5 / expected, rtol=1e-4, atol=1e-6)

    on_ranks(2, body)


@forked("megatron")
def test_bucket_groups_made_later_are_named(tmp_path):
    def body(rank):
        from megatron.core.distributed.param_and_grad_buffer import partition_buckets

        _start(rank, 2, tmp_path)
        with mindspeed_lite.enabled(**{NAME: "int8"}):
            model = _model()
            model.bucket_groups = partition_buckets(model.buffers)
            torch.testing.assert_close(_reduced(model, rank), _mean(2), rtol=1e-5, atol=1e-6)
            (fallback,) = mindspeed_lite.report().fallbacks
            assert "made after" in fallback.reason

    on_ranks(2, body)


def _checkpoint(model: Any, folder: Any, action: str) -> None:
    from megatron.core import dist_checkpointing

    weight = next(model.parameters()).data
    sharded = {
        "weight": dist_checkpointing.ShardedTensor.from_rank_offsets("weight", weight, replica_id=dist.get_rank())
    }
    getattr(dist_checkpointing, action)(sharded, str(folder))


@forked("megatron")
def test_error_feedback_goes_on_where_the_checkpoint_has_it(tmp_path):
    """The first step after a checkpoint: as without it, or with error feedback from zero and a notice on all ranks."""

    def body(rank):
        _start(rank, 2, tmp_path)
        folder = tmp_path / "checkpoint"
        if rank == 0:
            folder.mkdir()
        dist.barrier()
        # What each bucket group is given; the first two have the same shape.
        own = [_gradient(rank, group) for group in range(2)]

        def reduced(model):
            place = {parameter: place for place, parameter in enumerate(model.module.parameters())}
            groups = sorted(model.bucket_groups, key=lambda each: place[each.buckets[0].params_list[0]])
            for group, gradient in zip(groups, own, strict=True):
                group.reset()
                group.buckets[0].grad_data[: SIZE * SIZE] = gradient
                group.start_grad_sync()
                group.finish_grad_sync()
            return torch.stack([group.buckets[0].grad_data[: SIZE * SIZE].clone() for group in groups])

        # Outside of Megatron's loop bucket groups count the steps of the warm-up.
        flags = {NAME: "int8", f"{NAME}_warmup": 1, "strict": True}
        with mindspeed_lite.enabled(**flags):
            model = _model(layers=2)
            exact = reduced(model)
            first = reduced(model)
            _checkpoint(model, folder, "save")
            second = reduced(model)
            assert not torch.equal(first, second), "the same gradient, and what the first message lost"
            assert not torch.equal(exact, first)
        with mindspeed_lite.enabled(**flags):
            reduced(model)
            assert torch.equal(reduced(model), first), "on again"
        file = folder / f"{NAME}_{rank:05d}.pt"
        assert {each.name for each in folder.glob(f"{NAME}*")} == {f"{NAME}_{each:05d}.pt" for each in range(2)}
        whole = file.read_bytes()
        states = torch.load(file)
        assert len(states) == 2
        broken = {
            "whole": None,
            "other order": None,
            "other size": {k: {**v, "residuals": [x[:, 1:] for x in v["residuals"]]} for k, v in states.items()},
            "other buckets": {f"other {key}": state for key, state in states.items()},
            "no states": {key: 1 for key in states},
            "cut off": whole[: len(whole) // 2],
            "missing": b"",
        }
        for case, content in broken.items():
            # Rank 0 has a good file in any case.
            if rank == 1 and isinstance(content, dict):
                torch.save(content, file)
            elif rank == 1 and content is not None:
                file.write_bytes(content) if content else file.unlink()
            model = None
            gc.collect()
            with mindspeed_lite.enabled(**flags):
                model = _model(layers=2)
                if case == "other order":
                    mindspeed_lite.disable()
                    model.bucket_groups.reverse()
                    mindspeed_lite.enable(**flags)
                _checkpoint(model, folder, "load")
                found = reduced(model)
                notices = [each for each in mindspeed_lite.report().notices if NAME in each]
            # The owner of the sum receives what rank 1 sent; rank 0 keeps its own part.
            assert torch.equal(found, second) == (content is None), case
            assert not torch.equal(found, exact), "the warm-up is over on all ranks"
            if content is None:
                assert notices == [], case
                continue
            (notice,) = notices
            assert "error feedback of rank 1 starts at zero: " in notice and "\n" not in notice
            reasons = {"other size": "buckets differ", "other buckets": "of these ranks and buckets",
                       "missing": "has none"}  # fmt: skip
            assert reasons.get(case, "00001.pt cannot be read: ") in notice, notice

    on_ranks(2, body)
