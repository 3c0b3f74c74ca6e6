"""`--moe-record-load`: record the tokens of each expert and rank by layer and step.

Reaches `TopKRouter.forward` (one asynchronous reduction per layer and micro-batch) and `finalize_model_grads` (every
few steps rank 0 writes the sums). Counts only where a graph is built: neither evaluation nor recomputation. Without
sequence parallelism the first tensor-parallel rank counts. Falls back for models without experts and custom process
groups.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_lite.engine import Around, Context, Feature, Function, Option, OptionError, Session
from mindspeed_lite.parallel.balance import record
from mindspeed_lite.parallel.balance.counts import ExpertPlace, LoadCounter
from mindspeed_lite.platform.megatron import CONFIG

from ._shared import moe
from ._shared.conditions import CUDA_GRAPH_ARGS
from ._shared.steps import current_step, is_last_step

NAME = "moe_record_load"
INTERVAL = "moe_record_load_interval"


class _Recorder:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._file: str = session.settings[NAME]
        self._counter: LoadCounter | None = None
        self._header: record.LoadHeader | None = None
        self._step = 0
        session.on_end(self._say_what_is_missing)

    def count(self, router: Any, probs: Tensor, routing_map: Tensor) -> None:
        from megatron.core import parallel_state

        config = router.config
        # 0.12 has one global group.
        group = getattr(router, "tp_group", None) or parallel_state.get_tensor_model_parallel_group(False)
        if group is not None and not config.sequence_parallel and group.rank():
            return
        row = _row(router)
        counter = self._counter_of(config, routing_map.device)
        if counter is None:
            return
        if not 0 <= row < counter.shape[0]:
            self._session.fallback(NAME, f"a layer with the number {router.layer_number} is not counted")
            return
        with torch.no_grad():
            if config.moe_pad_expert_input_to_capacity:
                # Padding has probability 0.
                routing_map = routing_map & (probs != 0)
            counter.add(row, routing_map)

    def end_step(self, model: Sequence[Any]) -> None:
        """End a step; write counts every few steps and after the last one."""
        from megatron.core import parallel_state
        from megatron.core.utils import get_model_config

        config = get_model_config(model[0])
        counter = self._counter_of(config, next(model[0].parameters()).device)
        if counter is None:
            return
        self._step = current_step(self._session.context) or self._step + 1
        counter.end_step(self._step, self._experts_at(counter))
        if not (counter.is_full or is_last_step(self._session.context, self._step)):
            return
        if not parallel_state.model_parallel_is_initialized():
            self._session.fallback(NAME, "the groups of ranks are not those of megatron.core.parallel_state")
            self._counter = None
            return
        place = ExpertPlace(
            parallel_state.get_expert_data_parallel_rank(),
            parallel_state.get_expert_data_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
        )
        rows, steps = counter.take(place, torch.distributed.group.WORLD)
        if rows:
            self._write(config, place, rows, steps)

    def _experts_at(self, counter: LoadCounter) -> dict[int, Sequence[int]]:
        placed = self._session.find("enable_expert_placement")
        layers = {} if placed is None else placed.layers
        found = {_row(layer.router): each.experts_at for layer, each in layers.items() if not each.is_home}
        return {row: each for row, each in found.items() if row in range(counter.shape[0])}

    def _write(self, config: Any, place: ExpertPlace, rows: Sequence[int], steps: Sequence[record.LoadStep]) -> None:
        header = record.LoadHeader(
            experts=config.num_moe_experts,
            topk=config.moe_router_topk,
            expert_parallel=place.expert_parallel,
            replicas=place.replicas,
            decoder_layers=config.num_layers,
            layers=tuple(row + 1 for row in rows),
        )
        try:
            record.append(self._file, steps, None if header == self._header else header)
            self._header = header
        except OSError as error:
            self._session.fallback(NAME, f"{self._file} cannot be written: {error.strerror or error}")

    def _counter_of(self, config: Any, device: torch.device) -> LoadCounter | None:
        if not config.num_moe_experts:
            self._session.fallback(NAME, "a model without experts is not counted")
            return None
        shape = config.num_layers + (config.mtp_num_layers or 0), config.num_moe_experts
        if self._counter is None:
            self._counter = LoadCounter(*shape, self._session.settings[INTERVAL], device)
        if self._counter.shape != shape:
            self._session.fallback(NAME, "a second model with other layers or experts is not counted")
            return None
        return self._counter

    def _say_what_is_missing(self) -> None:
        # No collective: ranks need not end together.
        if self._counter is not None and self._counter.steps:
            self._session.log_decision(
                f"{NAME}: the last steps, {self._counter.steps}, are not in {self._file}: the feature ended between "
                "two messages (--moe-record-load-interval 1 writes each step)"
            )


def _row(router: Any) -> int:
    # Before 0.17 Megatron numbers them so.
    beyond = router.config.num_layers if getattr(router, "is_mtp_layer", False) else 0
    return (router.layer_number or 0) + beyond - 1  # type: ignore[no-any-return]


def _forward(wrapped: Function, session: Session) -> Function:
    recorder = session.state(NAME, lambda: _Recorder(session))

    def forward(self: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        probs, routing_map = wrapped(self, input, *args, **kwargs)
        if self.training and torch.is_grad_enabled():
            recorder.count(self, probs, routing_map)
        return probs, routing_map

    return forward


def _finalize(wrapped: Function, session: Session) -> Function:
    recorder = session.state(NAME, lambda: _Recorder(session))

    def finalize_model_grads(model: Any, *args: Any, **kwargs: Any) -> None:
        wrapped(model, *args, **kwargs)
        recorder.end_step(model)

    return finalize_model_grads


def _why_not(context: Context) -> list[str]:
    file = context.settings[NAME]
    if file and os.environ.get("RANK", "0") == "0" and (reason := record.why_not_writable(file)):
        raise OptionError(f"--moe-record-load {file}: {reason}.")
    return moe.has_experts(context)


FEATURE = Feature(
    name=NAME,
    summary="tokens of each expert and rank, by layer and step, written to a file",
    options=(
        Option(
            "--moe-record-load",
            help="Append tokens by expert, rank, layer and step to FILE; `mindspeed-lite balance FILE` shows them.",
            default=None,
            metavar="FILE",
            on="moe_load.jsonl",
        ),
        Option.count(
            "--moe-record-load-interval",
            "Steps between two messages in which ranks add up what they counted; each step has its own line.",
            10,
        ),
    ),
    numerics="bitwise",
    theme="experts",
    memory="not predicted: 4 bytes for each layer, expert and step between two messages",
    condition=_why_not,
    conflicting_args=CUDA_GRAPH_ARGS,
    not_auto="it writes a file: enable it explicitly with its flag",
    patches=(
        Around(
            "megatron.core.transformer.moe.router:TopKRouter.forward",
            _forward,
            reads=(
                "config",
                "layer_number",
                f"{CONFIG}.num_moe_experts",
                f"{CONFIG}.moe_router_topk",
                f"{CONFIG}.moe_pad_expert_input_to_capacity",
                f"{CONFIG}.mtp_num_layers",
                f"{CONFIG}.sequence_parallel",
            ),
        ),
        Around("megatron.core.distributed.finalize_model_grads:finalize_model_grads", _finalize),
    ),
)
