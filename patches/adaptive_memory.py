"""`--adaptive-memory`: keep, recompute or offload parts of layers within a memory budget.

The first steps record what each part saves and its time. A solver minimises time within the budget per pipeline rank,
and the next step measures its memory. Rank 0 prints and stores the choice; `--mindspeed-lite-explain-memory` prints it
and exits. Reaches `get_forward_backward_func`, layers when they are built, and the block that runs a chunk's layers.
Leaves evaluation alone. Experts that overlap communication are recomputed with their router and exchange.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_lite.engine import Around, Context, Feature, Function, Option, OptionError, Relation, Session
from mindspeed_lite.memory.copy_engine import CopyEngine, bandwidths
from mindspeed_lite.memory.layer_records import LayerRecorder
from mindspeed_lite.memory.offload import Offload
from mindspeed_lite.memory.recompute_choice import BudgetError, LayerChoice, StageRecord, choose, gib, leanest, merged
from mindspeed_lite.memory.saved_tensors import Tracker
from mindspeed_lite.platform.megatron import CONFIG
from mindspeed_lite.platform.timer import synchronize

from . import recompute_activation_function, swap_attention
from ._shared import linear_layers, recompute
from ._shared.recomputed_layers import RecomputedLayer
from ._shared.wrappers import forward_pass_patch

NAME, BUDGET, EXPLAIN = "adaptive_memory", "memory_budget", "mindspeed_lite_explain_memory"
_MOE_LAYER = "megatron.core.transformer.moe.moe_layer:MoELayer"
_CONFLICTING_ARGS = {
    "recompute_granularity": "--recompute-granularity says what is computed again: leave it out",
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm runs layers in pieces",
    "delay_wgrad_compute": "--delay-wgrad-compute keeps inputs until its weight gradients run",
    **recompute.CONFLICTING_ARGS,
}
# The first step is slower; times are those of the second.
RECORD_STEPS = 2
NOTHING_MOVES = "no part of a layer has anything that could be"
MAX_CHECKS = 3
TIMED_BYTES = 64 << 20


class _MemoryChoice:
    """Steps of the feature. Ranks of a stage run the same collectives: rank 0 solves for all, from their maxima."""

    def __init__(self, session: Session, budget: int, explains: bool) -> None:
        self._session, self._budget, self._explains = session, budget, explains
        self._layers: list[RecomputedLayer] = []
        self._steps, self._checks, self._is_done = 0, 0, False
        self._records: dict[int, StageRecord] = {}
        self._budgets: dict[int, int] = {}
        self._synchronize = functools.partial(synchronize, torch.device(session.context.device))
        self._engine: CopyEngine | None = None
        self._offload: Offload | None = None
        self._why_kept = "; ".join(swap_attention._why_not_here(session.context.device))
        self._recorder: LayerRecorder | None = None

    def add(self, layer: Any) -> None:
        if self._offload is None and not self._why_kept:
            device = torch.device(self._session.context.device)
            self._engine = swap_attention.CopyEngine(device)
            on_refusal = self._session.fallback_of(self._session.feature)
            self._offload = Offload(self._engine, device.type, None, on_refusal)
        self._layers.append(RecomputedLayer(len(self._layers), layer, self._session, self._offload))

    @contextlib.contextmanager
    def forward_pass(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._offload is not None:
                stack.enter_context(self._offload.forward_pass())
            if self._recorder is not None:
                stack.enter_context(self._recorder.forward_pass())
            yield

    def step(self, original: Function, given: dict[str, Any]) -> Any:
        if self._is_done or given.get("forward_only", False):
            return original(**given)
        if self._steps == 0 and not any(map(any, _by_stage(bool(self._layers)).values())):
            self._is_done = True
            name = self._session.feature
            self._session.fallback(name, "no layer was built while it is on: enable it before the model is built")
            return original(**given)
        if self._steps < RECORD_STEPS:
            return self._recorded(original, given)
        tracker = Tracker(_excluded(given))
        if self._offload is not None:
            self._offload.counter = tracker
        try:
            with tracker:
                result = original(**given)
        finally:
            if self._offload is not None:
                self._offload.counter = None
        self._check(tracker.peak, given)
        return result

    def _recorded(self, original: Function, given: dict[str, Any]) -> Any:
        recorder = self._recorder = LayerRecorder(len(self._layers), _excluded(given), self._synchronize)
        with contextlib.ExitStack() as stack:
            for layer in self._layers:
                stack.enter_context(layer.recorded(recorder))
            stack.enter_context(recorder)
            try:
                result = original(**given)
            finally:
                self._recorder = None
        self._steps = RECORD_STEPS if self._explains else self._steps + 1
        if self._steps == RECORD_STEPS:
            record = self._record_of(recorder)
            self._records = {stage: merged(each) for stage, each in _by_stage(record).items()}
            self._budgets = dict.fromkeys(self._records, self._budget)
            self._solve(given)
            if self._explains:
                sys.exit(0)
        return result

    def _record_of(self, recorder: LayerRecorder) -> StageRecord:
        can = [layer.can for layer in self._layers]
        found = StageRecord(can, recorder.layers, recorder.moments, [layer.can_swap for layer in self._layers])
        if self._engine is None or self._offload is None:
            return found
        found.rates = (1.0, 1.0)
        moved = max((way.moved for each in found.options() for way in each), default=0)
        found.rates = None
        if moved:
            device = torch.device(self._session.context.device)
            try:
                found.rates = bandwidths(self._engine, device, min(moved, TIMED_BYTES))
            except (MemoryError, RuntimeError) as error:
                self._session.notice(f"{self._session.feature}: no copy to the host was made: {error}")
        return found

    def _solve(self, given: dict[str, Any]) -> None:
        answer: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                answer = [{stage: self._chosen(stage) for stage in sorted(self._records)}]
            except BudgetError as error:
                answer = [str(error)]
        dist.broadcast_object_list(answer, 0)
        if isinstance(answer[0], str):
            raise OptionError(f"{self._session.feature}: {answer[0]}{_what_reaches_it(given)}")
        for layer, option in zip(self._layers, answer[0][_stage()].options, strict=True):
            layer.run_again(option.again, option.swapped)
        for stage, choice in answer[0].items():
            record = self._records[stage]
            why_kept = self._why_kept or NOTHING_MOVES
            text = choice.table(record.everything(), self._budget, stage, len(answer[0]), record.rates, why_kept)
            self._session.log_decision(text)

    def _chosen(self, stage: int) -> LayerChoice:
        record = self._records[stage]
        options, transfers = record.options(), record.transfers()
        try:
            return choose(options, record.moments, self._budgets[stage], transfers)
        except BudgetError as error:
            if self._budgets[stage] == self._budget:
                raise BudgetError(error.least, self._budget, stage) from None
        # Above the prediction: take the choice with the least memory.
        self._session.log_decision(f"{self._session.feature}: stage {stage} runs with the least possible from here on")
        return leanest(options, record.moments, transfers)

    def _check(self, measured: int, given: dict[str, Any]) -> None:
        self._checks += 1
        found = {stage: max(each) for stage, each in _by_stage(measured).items()}
        shown = ", ".join(
            f"{gib(size)}{f' on stage {stage}' if len(found) > 1 else ''}" for stage, size in found.items()
        )
        self._session.log_decision(f"{self._session.feature}: measured {shown}; the budget is {gib(self._budget)}")
        above = {stage: size - self._budget for stage, size in found.items() if size > self._budget}
        self._is_done = not above or self._checks == MAX_CHECKS
        if not self._is_done:
            for stage, size in above.items():
                self._budgets[stage] -= size
            self._solve(given)


def _models(given: dict[str, Any]) -> list[Any]:
    return list(given["model"]) if isinstance(given["model"], (list, tuple)) else [given["model"]]


def _excluded(given: dict[str, Any]) -> Callable[[int], bool]:
    parameters = [each for model in _models(given) for each in model.parameters()]
    return {each.untyped_storage()._cdata for each in parameters}.__contains__


def _stage() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_pipeline_model_parallel_rank())


def _by_stage(mine: Any) -> dict[int, list[Any]]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (_stage(), mine))
    stages: dict[int, list[Any]] = {}
    for stage, each in found:
        stages.setdefault(stage, []).append(each)
    return stages


def _what_reaches_it(given: dict[str, Any]) -> str:
    more = f"--micro-batch-size below {given['micro_batch_size']}, " if given["micro_batch_size"] > 1 else ""
    return (
        f": raise --memory-budget to that, or take {more}a larger --tensor-model-parallel-size with "
        "--sequence-parallel, or a larger --context-parallel-size"
    )


def _state(session: Session) -> _MemoryChoice:
    settings = session.settings
    return session.state(NAME, lambda: _MemoryChoice(session, int(settings[BUDGET] * 2**30), bool(settings[EXPLAIN])))


def _prepare(layer: Any, session: Session, index: int | None) -> None:
    if recompute.can_release(NAME, layer.config, session, _CONFLICTING_ARGS):
        _state(session).add(layer)


def _choose(wrapped: Function, session: Session) -> Function:
    # Stages without layers take part in the collectives too.
    _state(session)

    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        original = wrapped(*args, **kwargs)

        @functools.wraps(original)
        def forward_backward(**given: Any) -> Any:
            # A training loop may hold this function after the session has ended.
            state = session.find(NAME)
            return original(**given) if state is None else state.step(original, given)

        return forward_backward

    return get_forward_backward_func


def _check(context: Context) -> list[str]:
    if context.settings.get(NAME):
        if context.settings.get(BUDGET) is None:
            raise OptionError(f"{NAME}: add --memory-budget GIB, which activations of a rank may take")
        if importlib.util.find_spec("scipy") is None:
            raise OptionError(f"{NAME} needs scipy, which solves for the choice: pip install mindspeed-lite[adaptive]")
    return []


_CHOSEN_HERE = "it is chosen here, layer by layer: leave its flag out"

FEATURE = Feature(
    name=NAME,
    summary="what layers keep, compute again and move to the host, chosen within a budget of memory",
    options=(
        Option("--adaptive-memory"),
        Option.amount(
            "--memory-budget", "Memory that the activations of a rank may take, for --adaptive-memory.", "GIB"
        ),
        Option("--mindspeed-lite-explain-memory", help="Print what --adaptive-memory chooses, and end."),
    ),
    numerics="ulp",
    theme="memory",
    memory="not predicted: it is within the budget, and is measured after the choice",
    unsupported={"<0.16": "not trained on a release of Megatron before 0.16"},
    condition=_check,
    conflicting_args=_CONFLICTING_ARGS,
    conflicts=(
        Relation("recompute_activation_function", _CHOSEN_HERE),
        Relation("recompute_norm", _CHOSEN_HERE),
        Relation("moe_zero_memory", "it releases what is chosen here: leave its flag out"),
        Relation("swap_attention", "it moves what is chosen here: leave its flag out"),
        Relation("balanced_moe_experts", "its copies of experts have not been trained with it"),
        Relation("pipeline_schedule", "its orders may delay weight gradients, which keeps their inputs"),
    ),
    not_auto=recompute.NOT_AUTO,
    patches=(
        recompute.in_layers(
            _prepare,
            (
                "mlp", "self_attention", "input_layernorm", "pre_mlp_layernorm", "recompute_input_layernorm",
                "recompute_pre_mlp_layernorm", f"{CONFIG}.recompute_modules", f"{CONFIG}.moe_shared_expert_overlap",
                f"{CONFIG}.add_bias_linear", f"{_MOE_LAYER}.experts", f"{_MOE_LAYER}.shared_experts",
            ),
        ),
        Around("megatron.core.pipeline_parallel.schedules:get_forward_backward_func", _choose),
        forward_pass_patch(NAME),
        linear_layers.PLACEHOLDER_PATCH,
        recompute.CHECKPOINT_PATCH,
        *recompute_activation_function.MLP_PATCHES,
    ),
)  # fmt: skip
