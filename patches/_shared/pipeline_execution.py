"""Runs a training or evaluation step by a data-described schedule with Megatron's functions."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mindspeed_lite.engine import Function, OptionError, Session, Settings
from mindspeed_lite.memory.recompute_ahead import RecomputedUnits, Unit
from mindspeed_lite.pipeline.data_parallel_sync import DataParallelSync, sync_plan
from mindspeed_lite.pipeline.orders import PipelineShape
from mindspeed_lite.pipeline.program import Joining, Program, compile_program
from mindspeed_lite.pipeline.run import Executor, Trace
from mindspeed_lite.pipeline.steps import Kind, Schedule

from . import pipeline_orders
from .pipeline_passes import (
    CombinedPasses,
    DelayedWgrads,
    MegatronPasses,
    MegatronTransport,
    OverlappedTransport,
    TrainingStep,
)
from .proxies import AttributeOverride
from .wrappers import filter_kwargs


class PlannedStep:
    def __init__(self, schedule: Schedule, rank: int, program: Program) -> None:
        steps = [*schedule.steps(rank)]
        self.schedule, self.program, self.sync = schedule, program, sync_plan(steps, schedule.num_chunks, rank)
        self.last_rank = schedule.locations[schedule.num_stages - 1][0]
        self.recomputed = frozenset(step[1:] for step in steps if step.kind is Kind.RECOMPUTE)
        kinds = [step.kind for step in steps]
        forwards = [step for step in steps if step.kind is Kind.FORWARD]
        ahead = next((place for place, kind in enumerate(kinds) if kind is not Kind.FORWARD), len(kinds))
        # Windows in which Megatron fully recomputes the later forwards.
        self.place_in_window = {step: place % ahead for place, step in enumerate(forwards)}


class ExecutorState:
    def __init__(self, session: Session) -> None:
        self.planned: dict[Any, PlannedStep] = {}
        self.delayed: weakref.WeakKeyDictionary[Any, DelayedWgrads] = weakref.WeakKeyDictionary()
        self.is_on = True
        session.on_end(self.end)

    def end(self) -> None:
        self.is_on = False

    def delayed_of(self, model: Any) -> DelayedWgrads:
        if model not in self.delayed:
            self.delayed[model] = DelayedWgrads(model)
        return self.delayed[model]


def listed(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [given]


def execute(
    session: Session,
    state: ExecutorState,
    settings: Settings,
    config: Any,
    *,
    forward_step_func: Function,
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: None = None,
    p2p_communicator: Any = None,
    pg_collection: Any = None,
    grad_finalize_pgs: Any = None,
    force_all_reduce: bool | None = False,
) -> list[Any]:
    import torch
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

    models, groups = listed(model), grad_finalize_pgs if pg_collection is None else pg_collection
    tp = parallel_state.get_tensor_model_parallel_group() if groups is None else groups.tp
    cp = parallel_state.get_context_parallel_group() if groups is None else groups.cp
    if p2p_communicator is None:
        pp = parallel_state.get_pipeline_model_parallel_group()
        p2p_communicator = schedules.P2PCommunicator(pp_group=pp, config=config)
    ranks, rank = p2p_communicator.pp_group.size(), p2p_communicator.pp_group.rank()
    group = config.microbatch_group_size_per_vp_stage if len(models) > 1 else 0
    delays = pipeline_orders.delays_weight_gradients(settings) and not forward_only
    # A blocking send would delay weight gradients that could run meanwhile.
    is_async = config.overlap_p2p_comm or (delays and not config.use_ring_exchange_p2p)
    shape = (ranks, num_microbatches, len(models), group)
    is_combined = not forward_only and bool(getattr(config, "overlap_moe_expert_parallel_comm", False))
    planned = _planned(settings, state, shape, rank, forward_only, config, is_async, is_combined)
    last_rank = planned.last_rank
    finalizes = config.finalize_model_grads_func is not None and not forward_only
    if finalizes:
        embedding = schedules.clear_embedding_activation_buffer(config, model, is_last_stage=rank == last_rank)
    if config.timers is not None:
        config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    # A per-token loss needs the count, which travels with the losses.
    counts = config.calculate_per_token_loss or last_rank != ranks - 1
    this = TrainingStep(
        forward_step_func,
        listed(data_iterator),
        models,
        config,
        num_microbatches,
        cp.size(),
        forward_only,
        collect_non_loss_data,
        first_val_step,
        num_tokens=torch.zeros([], dtype=torch.int, device="cuda") if counts else None,
    )
    fully = config.num_microbatches_with_partial_activation_checkpoints
    if fully is not None and not forward_only:
        this.checkpointed = {step[1:]: place >= fully for step, place in planned.place_in_window.items()}
    is_synced = not forward_only and DataParallelSync.is_asked_for(config)
    sync = DataParallelSync(config, models, planned.sync, is_first_stage=rank == 0) if is_synced else None
    delayed = [state.delayed_of(each) for each in models] if delays else []
    is_recomputed = pipeline_orders.recomputes_in_steps(settings) and not forward_only
    recomputed = _units_of_step(session, config, planned.recomputed) if is_recomputed else None
    made = CombinedPasses if is_combined else MegatronPasses
    passes = made(schedules, this, planned.schedule, rank, planned.sync, delayed, recomputed)
    tensor_shapes = schedules.get_tensor_shapes(
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        # With several chunks Megatron ignores the decoder's own length.
        decoder_seq_length=decoder_seq_length if len(models) == 1 else None,
        config=config,
        tp_group=tp,
        cp_group=cp,
    )
    communicator = p2p_communicator
    if is_async and config.batch_p2p_comm:
        # Megatron waits for batched messages.
        single = AttributeOverride(config, batch_p2p_comm=False)
        communicator = schedules.P2PCommunicator(pp_group=p2p_communicator.pp_group, config=single)
    transport = (OverlappedTransport if is_async else MegatronTransport)(communicator, tensor_shapes[0])
    folder = settings.get("pipeline_schedule_trace")
    trace = None if forward_only or folder is None else _trace(folder, rank)
    Executor(planned.program, passes, transport, not forward_only, trace, sync).run()
    if last_rank != ranks - 1:
        _hand_on(this, p2p_communicator.pp_group, last_rank)
    if finalizes:
        schedules.finish_embedding_wgrad_compute(config, embedding, rank == last_rank, tp)
        schedule = schedules.forward_backward_pipelining_without_interleaving
        config.finalize_model_grads_func(
            models,
            this.num_tokens if config.calculate_per_token_loss else None,
            **filter_kwargs(
                schedule, force_all_reduce=force_all_reduce, pg_collection=groups, grad_finalize_pgs=groups
            ),
        )
    if config.timers is not None:
        config.timers("forward-backward").stop()
    return this.losses


def _hand_on(this: TrainingStep, group: Any, source: int) -> None:
    """Send losses and token count to the last rank, where Megatron reads them."""
    import torch.distributed as dist

    source, target = dist.get_global_rank(group, source), dist.get_global_rank(group, group.size() - 1)
    given: list[Any] = [this.losses, this.num_tokens]
    if dist.get_rank() == source:
        # Tensors arrive on the device they were sent from.
        dist.send_object_list(_on("cpu", given), target, group=group)
    elif dist.get_rank() == target:
        dist.recv_object_list(given, source, group=group)
        this.losses, this.num_tokens = _on(this.num_tokens.device, given)


def _on(device: Any, given: list[Any]) -> list[Any]:
    import torch
    from torch.utils._pytree import tree_map_only

    moved: list[Any] = tree_map_only(torch.Tensor, lambda each: each.to(device), given)
    return moved


def _planned(
    settings: Settings,
    state: ExecutorState,
    shape: tuple[int, int, int, int],
    rank: int,
    forward_only: bool,
    config: Any,
    is_async: bool,
    is_combined: bool = False,
) -> PlannedStep:
    # Megatron exchanges all lengths of a call before it sends a tensor.
    exchanges_lengths = config.variable_seq_lengths or getattr(config, "mtp_standalone", False)
    joining: Joining = "none" if exchanges_lengths else "one way" if is_async else "all"
    lookahead = int(is_async)
    order = pipeline_orders.name_of(settings)
    recomputed = [settings.get(each) for each in (pipeline_orders.IN_BUBBLE, pipeline_orders.IN_ADVANCE)]
    key = (shape, rank, forward_only, joining, lookahead, is_combined, order, *recomputed)
    found = state.planned.get(key)
    if found is None:
        schedule = pipeline_orders.schedule_of(settings, PipelineShape(*shape), forward_only)
        # With lookahead a receive starts one step early.
        program = compile_program(schedule, rank, lookahead, joining, is_combined)
        found = state.planned[key] = PlannedStep(schedule, rank, program)
    return found


def _trace(folder: str, rank: int) -> Trace:
    import torch

    Path(folder).mkdir(parents=True, exist_ok=True)
    return Trace(rank, Path(folder) / f"rank{torch.distributed.get_rank()}.jsonl")


def recomputed_units(session: Session) -> RecomputedUnits:
    stores_others = bool(session.settings.get(pipeline_orders.IN_BUBBLE))
    found: RecomputedUnits | None = session.find(pipeline_orders.RECORDED)
    return found or session.state(pipeline_orders.RECORDED, lambda: RecomputedUnits(_snapshot, stores_others))


def _units_of_step(session: Session, config: Any, units: frozenset[Unit]) -> RecomputedUnits:
    if config.recompute_granularity != "full":
        raise OptionError(
            "recompute_in_bubble: the model's configuration has no full recomputation, which steps could run: set "
            "recompute_granularity to 'full', recompute_method to 'uniform' and recompute_num_layers to 1"
        )
    found = recomputed_units(session)
    found.begin(units)
    return found


def _snapshot() -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Capture Megatron's random states; return the context of a second run."""
    from megatron.core.tensor_parallel import random

    states = random._get_all_rng_states()
    begin, end = (getattr(random, f"_{name}_checkpointing", lambda: None) for name in ("set", "unset"))

    @contextlib.contextmanager
    def restored() -> Iterator[None]:
        begin()
        try:
            with random._fork_rng():
                random._set_all_rng_states(*states)
                yield
        finally:
            end()

    return restored
