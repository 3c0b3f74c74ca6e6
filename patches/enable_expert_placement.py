"""`--enable-expert-placement`: exchange experts between ranks every N steps to balance load.

An average of router choices predicts load. Experts move with all their tensors after an optimizer step, if that saves
more time than it costs. Reaches `MoELayer.route`, whose columns are reordered; `ChainedOptimizer.step`; and
`sharded_state_dict`, which first moves experts back, so checkpoints are Megatron's. `state_dict` and `load_state_dict`
raise meanwhile. Falls back for experts other than SequentialMLP and for experts that differ in shape or trainability.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_lite.engine import Around, Context, Feature, Function, Option, Relation, Session
from mindspeed_lite.parallel.balance.placer import PlacedExperts, PlacementGroup, Placer, StateOf
from mindspeed_lite.platform.megatron import CONFIG

from ._shared import moe
from ._shared.conditions import CUDA_GRAPH_ARGS, FSDP_ARGS, every
from ._shared.optimizer_state import finish_gathers, leaves, main_params, training_state
from ._shared.wrappers import after, before

NAME, FLAG = "enable_expert_placement", "--enable-expert-placement"
INTERVAL, BREAK_EVEN = "expert_placement_freq", "expert_placement_break_even"
_log = logging.getLogger("mindspeed_lite")


class _Placements(Placer):
    def __init__(self, session: Session) -> None:
        super().__init__(session.settings[INTERVAL], session.settings.get(BREAK_EVEN))
        self._session = session
        self._hooks: list[Any] = []
        self._optimizers: list[weakref.ref[Any]] = []
        self._is_in_step = False
        session.on_end(self.end)

    def routed(self, layer: Any, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self.layers:
            self.layers[layer] = PlacedExperts(layer.config.num_moe_experts, layer.ep_group, routing_map.device)
        found = self.layers[layer]
        # The first pass of a recomputed layer has no graph.
        if layer.training and torch.is_grad_enabled():
            self._is_in_step = True
            with torch.no_grad():
                found.average.add(routing_map)
        return found.by_place(probs), found.by_place(routing_map)

    def end_step_of(self, optimizer: Any) -> None:
        self._is_in_step = False
        self._optimizers = [weakref.ref(each) for each in leaves(optimizer)]
        self.end_step()

    def end(self) -> None:
        is_late = self._is_in_step and bool(self.away)
        try:
            self.go_home()
        finally:
            self._remove_hooks()
        if is_late:
            raise RuntimeError(
                "experts went back within a step, whose gradients are those of the experts in their places: skip its "
                "update, or call disable() between two steps"
            )

    def placement_group(self) -> PlacementGroup | None:
        from megatron.core import parallel_state

        if not parallel_state.model_parallel_is_initialized():
            self.say("fallback", "the groups of ranks are not those of megatron.core.parallel_state")
            return None
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        return PlacementGroup(group, parallel_state.get_expert_data_parallel_world_size())

    def experts(self, layer: Any) -> Sequence[torch.nn.Module]:
        return getattr(layer.experts, "local_experts", ())

    def why_not(self, layer: Any) -> str:
        from megatron.core.transformer.moe.experts import SequentialMLP

        if type(layer.experts) is SequentialMLP:
            return ""
        return f"experts are a {type(layer.experts).__name__}: those of a SequentialMLP change places"

    def state_of(self) -> StateOf:
        optimizers = [found for each in self._optimizers if (found := each()) is not None]
        finish_gathers(optimizers)
        mains = main_params(optimizers)
        return lambda parameters: training_state(parameters, mains)

    def has_moved(self) -> None:
        """Refuse state dicts of layers whose experts are away."""
        self._remove_hooks()
        for each in self.away:
            self._hooks.append(each.experts.register_state_dict_pre_hook(_refuse))
            self._hooks.append(each.experts.register_load_state_dict_pre_hook(_refuse))

    def say(self, kind: str, text: str) -> None:
        if kind == "fallback":
            self._session.fallback(NAME, text)
        elif kind == "decision":
            self._session.log_decision(f"{NAME}: {text}")
        elif torch.distributed.get_rank() == 0:
            _log.warning("%s: %s", NAME, text)

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()


def _refuse(*given: Any) -> None:
    raise RuntimeError(
        f"{NAME}: experts are at other places than their names say: use `sharded_state_dict`, which puts them back, or "
        "end the feature first"
    )


def _state(session: Session) -> _Placements:
    return session.state(NAME, lambda: _Placements(session))


def _route(wrapped: Function, session: Session) -> Function:
    placements = _state(session)

    def route(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        probs, routing_map = wrapped(self, hidden_states, *args, **kwargs)
        return placements.routed(self, probs, routing_map)

    return route


def _end_step(session: Session, optimizer: Any) -> None:
    _state(session).end_step_of(optimizer)


def _go_home(session: Session, _: Any) -> None:
    _state(session).go_home()


def _refuse_elsewhere(session: Session, _: Any) -> None:
    if _state(session).away:
        _refuse()


def _why_not(context: Context) -> list[str]:
    reasons = []
    ranks, experts = moe.expert_sizes(context)[1], context.arg("num_experts", None)
    if ranks > 1 and experts and experts // ranks == 1:
        reasons.append("a rank has one expert: no other place changes the load of ranks")
    if context.arg("optimizer", "adam") not in ("adam", "sgd"):
        reasons.append(f"--optimizer {context.arg('optimizer')} keeps more than states of a parameter's shape")
    if context.arg("ckpt_format", "torch_dist") == "torch":
        reasons.append("--ckpt-format torch is written by some ranks alone, and all exchange experts: use torch_dist")
    return reasons


FEATURE = Feature(
    name=NAME,
    summary="experts change places among ranks every few steps, so that ranks have equal load",
    options=(
        Option(FLAG),
        Option.count("--expert-placement-freq", "Steps between two placements of experts (default: 50).", 50),
        Option.amount(
            "--expert-placement-break-even",
            "Tokens of a step that the fullest rank must lose for each slot in which experts move (default: "
            "measured at the first placement).",
            "TOKENS",
        ),
    ),
    numerics="ulp",
    theme="experts",
    unsupported={"<0.16": "not trained on a release of Megatron before 0.16"},
    memory="none but a message of one expert while experts move",
    condition=every(
        _why_not,
        moe.sequential_experts,
        moe.spread_experts("every rank has all experts"),
        moe.dispatchers("alltoall", "allgather"),
    ),
    conflicting_args={
        **CUDA_GRAPH_ARGS,
        **dict.fromkeys(FSDP_ARGS, "FSDP holds experts in shards of its own"),
        "fp8_param_gather": "--fp8-param-gather keeps weights in fp8",
        "fp4_param_gather": "--fp4-param-gather keeps weights in fp4",
        "use_precision_aware_optimizer": "--use-precision-aware-optimizer keeps main parameters in Transformer Engine",
        "optimizer_cpu_offload": "--optimizer-cpu-offload has an optimizer of its own",
        "offload_optimizer_states": "--offload-optimizer-states moves states itself",
        "rl_offload_optimizer_during_inference": "--rl-offload-optimizer-during-inference moves states itself",
        "use_layer_wise_distributed_optimizer": "--use-layer-wise-distributed-optimizer has a layout of its own",
        "overlap_param_gather_with_optimizer_step": "--overlap-param-gather-with-optimizer-step gathers in the step",
        "moe_pad_expert_input_to_capacity": "--moe-pad-expert-input-to-capacity gives all experts as many tokens",
    },
    conflicts=(Relation("moe_alltoall_mc2", "they have not been trained together"),),
    not_auto="what it gains depends on the router and has been measured on CPU alone: enable it with its flag",
    patches=(
        Around(
            "megatron.core.transformer.moe.moe_layer:MoELayer.route",
            _route,
            reads=("config", "ep_group", "experts", f"{CONFIG}.num_moe_experts"),
        ),
        Around(
            "megatron.core.optimizer.optimizer:ChainedOptimizer.step", after(_end_step), reads=("chained_optimizers",)
        ),
        Around("megatron.core.transformer.moe.experts:SequentialMLP.sharded_state_dict", before(_go_home)),
        Around("megatron.core.optimizer.optimizer:ChainedOptimizer.sharded_state_dict", before(_go_home)),
        Around("megatron.core.optimizer.optimizer:ChainedOptimizer.state_dict", before(_refuse_elsewhere)),
        Around("megatron.core.optimizer.optimizer:ChainedOptimizer.load_state_dict", before(_refuse_elsewhere)),
    ),
)
