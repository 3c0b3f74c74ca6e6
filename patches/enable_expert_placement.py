"""`--enable-expert-placement`: every N steps experts change places among ranks, so that ranks have equal load.

The load of each expert is predicted by an exponential average of what the router chose. Experts of the same local slot
change places: all tensors of an expert (parameters, main parameters or their shard, optimizer states in every form) are
then laid out alike on all ranks that share experts, and are exchanged as bytes between an optimizer's step and the
next forward pass. Experts move only if that saves more time by the next placement than it takes.

Reaches `MoELayer.route`, whose result every release hands to the dispatcher: its columns are put in the order of
places. Router, auxiliary losses, biases of experts and `--moe-record-load` see experts by their own numbers; dispatcher
and experts see places. `ChainedOptimizer.step` says that a step has ended. `SequentialMLP.sharded_state_dict` and
`ChainedOptimizer.sharded_state_dict` first put experts back, so that checkpoints are Megatron's own; after the next
step they return to their places. `state_dict` and `load_state_dict` may be called by some ranks alone: refused while
experts are elsewhere. Leaves the exchange of tokens and the product of experts alone. Falls back for other experts than
SequentialMLP's, and for ranks whose experts differ in shape or in what is trained.
"""

from __future__ import annotations

import logging
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mindspeed_lite.engine import Around, Context, Feature, Option, OptionError, Relation, Session, Settings
from mindspeed_lite.parallel.balance import payoff
from mindspeed_lite.parallel.balance.load_average import alike, predicted
from mindspeed_lite.parallel.balance.placed_experts import PlacedExperts, StateOfSlot
from mindspeed_lite.parallel.balance.placement import moved
from mindspeed_lite.platform.megatron import CONFIG

from ._shared import moe
from ._shared.conflicts import CUDA_GRAPH_ARGS, FSDP_ARGS
from ._shared.given_flags import given_flags, require_first
from ._shared.training_state import finish_gathers, leaves, main_params, training_state

NAME, FLAG = "enable_expert_placement", "--enable-expert-placement"
INTERVAL, BREAK_EVEN = "expert_placement_freq", "expert_placement_break_even"
_log = logging.getLogger("mindspeed_lite")


class _Placements:
    """The layers of a session, and the optimizers of its last step."""

    def __init__(self, session: Session) -> None:
        self._session = session
        # By the layer of Megatron's; in the order of the first forward pass, which all ranks of a stage share.
        self.layers: weakref.WeakKeyDictionary[Any, PlacedExperts] = weakref.WeakKeyDictionary()
        self._served: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._hooks: list[Any] = []
        self._optimizers: list[weakref.ref[Any]] = []
        self._prices: dict[tuple[int, ...], float] = {}
        self._step = 0
        self._is_in_step = False
        session.on_end(self.end)

    def routed(self, layer: Any, probs: torch.Tensor, routing_map: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the dispatcher is given instead; counts it."""
        if layer not in self.layers:
            self.layers[layer] = PlacedExperts(layer.config.num_moe_experts, layer.ep_group, routing_map.device)
        found = self.layers[layer]
        # A layer that is computed again has no graph the first time.
        if layer.training and torch.is_grad_enabled():
            self._is_in_step = True
            with torch.no_grad():
                found.average.add(routing_map)
        return found.by_place(probs), found.by_place(routing_map)

    def end_step(self, optimizer: Any) -> None:
        """Between an optimizer's step and the next forward pass."""
        self._is_in_step = False
        self._optimizers = [weakref.ref(each) for each in leaves(optimizer)]
        self._step += 1
        for each in self.layers.values():
            each.average.end_step()
        if self._step % self._session.settings[INTERVAL] == 0:
            self._place()
        else:
            self._move({layer: each.wanted for layer, each in self.layers.items() if each.wanted is not None})

    def go_home(self) -> None:
        """Put every expert back where Megatron has it; after the next step it returns."""
        away = {layer: each for layer, each in self.layers.items() if not each.is_home}
        places = [each.placement for each in away.values()]
        self._move({layer: each.home for layer, each in away.items()})
        for each, before in zip(away.values(), places, strict=True):
            each.wanted = before

    def refuse_elsewhere(self) -> None:
        if not all(each.is_home for each in self.layers.values()):
            _refuse()

    def end(self) -> None:
        is_late = self._is_in_step and not all(each.is_home for each in self.layers.values())
        try:
            self.go_home()
        finally:
            self._refuse_state_dicts(())
        if is_late:
            raise RuntimeError(
                "experts went back within a step, whose gradients are those of the experts in their places: skip its "
                "update, or call disable() between two steps"
            )

    def _place(self) -> None:
        """Choose places for the predicted loads. A collective of the ranks of a pipeline stage."""
        from megatron.core import parallel_state

        if not parallel_state.model_parallel_is_initialized():
            self._session.fallback(NAME, "the groups of ranks are not those of megatron.core.parallel_state")
            return
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        replicas = parallel_state.get_expert_data_parallel_world_size()
        layers = self._served_layers(group)
        if not layers:
            return
        plans, imbalances = {}, []
        for layer, totals in zip(layers, predicted([self.layers[each].average for each in layers], group), strict=True):
            # One replica of the experts has an equal part of the tokens.
            loads = [each / replicas for each in totals]
            price = self._price(layer, sum(loads) / len(loads), group)
            plans[layer], *both = self.layers[layer].chosen(loads, price)
            imbalances.append(both)
        moves = sum(moved(after, self.layers[layer].intended) for layer, after in plans.items())
        start = time.perf_counter()
        sent = self._move(plans)
        if moves and torch.distributed.get_rank() == 0:
            before, after = (sum(each) / len(layers) for each in zip(*imbalances, strict=True))
            _log.warning(
                "%s: step %d: %d experts of %d layers change places, rank 0 sends %.1f MB in %.2f s; fullest rank over "
                "the mean, predicted: %.3f before, %.3f after",
                *(NAME, self._step, moves, len(layers), sent / 1e6, time.perf_counter() - start, before, after),
            )

    def _served_layers(self, group: Any) -> list[Any]:
        new = [each for each in self.layers if each not in self._served]
        if new:
            same = alike([_fingerprint(each.experts) for each in new], group, next(new[0].parameters()).device)
            for layer, is_same in zip(new, same, strict=True):
                reason = _reason(layer.experts) or (
                    "" if is_same else "experts of ranks differ in shape, or in what is trained"
                )
                self._served[layer] = not reason
                if reason:
                    self._session.fallback(NAME, reason)
        return [each for each in self.layers if self._served[each]]

    def _price(self, layer: Any, tokens: float, group: Any) -> float:
        """Tokens of a step that the fullest rank must lose for the exchange of a slot; tokens: of an expert, about."""
        given = self._session.settings.get(BREAK_EVEN)
        if given is not None:
            return float(given)
        parameters = [*layer.experts.local_experts[0].parameters()]
        shapes = tuple(each.numel() for each in parameters)
        if shapes not in self._prices:
            costs = payoff.measure(parameters, round(tokens), layer.ep_group, group)
            with training_state(parameters, main_params(self._living_optimizers())) as tensors:
                size = torch.tensor(sum(each.nbytes for each in tensors), device=parameters[0].device)
            # Shards of ranks differ in size.
            torch.distributed.all_reduce(size, torch.distributed.ReduceOp.MAX, group=group)
            copied = payoff.copied_bytes(parameters)
            self._prices[shapes] = costs.break_even_of_move(int(size) / copied, self._session.settings[INTERVAL])
            self._session.log_decision(
                f"{NAME}: experts of a slot move where that takes {self._prices[shapes]:.3g} tokens a step off the "
                "fullest rank"
            )
        return self._prices[shapes]

    def _living_optimizers(self) -> list[Any]:
        return [found for each in self._optimizers if (found := each()) is not None]

    def _move(self, plans: Mapping[Any, list[int]]) -> int:
        """Bring layers to these placements; returns the bytes that this rank sent. A collective."""
        moving = {layer: after for layer, after in plans.items() if after != self.layers[layer].placement}
        for layer in plans:
            self.layers[layer].wanted = None
        if not moving:
            return 0
        optimizers = self._living_optimizers()
        finish_gathers(optimizers)
        mains, sent = main_params(optimizers), 0

        def state_of(layer: Any) -> StateOfSlot:
            return lambda slot: training_state([*layer.experts.local_experts[slot].parameters()], mains)

        for layer, after in moving.items():
            sent += self.layers[layer].move(after, state_of(layer))
        self._refuse_state_dicts([layer for layer, each in self.layers.items() if not each.is_home])
        return sent

    def _refuse_state_dicts(self, layers: Sequence[Any]) -> None:
        """Of these layers alone."""
        while self._hooks:
            self._hooks.pop().remove()
        for each in layers:
            self._hooks.append(each.experts.register_state_dict_pre_hook(_refuse))
            self._hooks.append(each.experts.register_load_state_dict_pre_hook(_refuse))


def _reason(experts: Any) -> str:
    """Why experts stay where they are, the same on every rank; "" if they may move."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    if type(experts) is SequentialMLP:
        return ""
    return f"experts are a {type(experts).__name__}: those of a SequentialMLP change places"


def _fingerprint(experts: Any) -> int:
    """A number of what experts must have in common to change places."""
    text = [
        [(tuple(each.shape), str(each.dtype), each.requires_grad) for each in expert.parameters()]
        for expert in getattr(experts, "local_experts", ())
    ]
    return zlib.crc32(repr(text).encode())


def _refuse(*given: Any) -> None:
    raise RuntimeError(
        f"{NAME}: experts are at other places than their names say: use `sharded_state_dict`, which puts them back, or "
        "end the feature first"
    )


def _state(session: Session) -> _Placements:
    return session.state(NAME, lambda: _Placements(session))


def _route(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    placements = _state(session)

    def route(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        probs, routing_map = wrapped(self, hidden_states, *args, **kwargs)
        return placements.routed(self, probs, routing_map)

    return route


def _step(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    placements = _state(session)

    def step(self: Any) -> Any:
        found = wrapped(self)
        placements.end_step(self)
        return found

    return step


def _sharded_state_dict(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    placements = _state(session)

    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        placements.go_home()
        return wrapped(self, *args, **kwargs)

    return sharded_state_dict


def _state_dict(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    placements = _state(session)

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        placements.refuse_elsewhere()
        return wrapped(self, *args, **kwargs)

    return state_dict


def _enabled(settings: Settings) -> bool:
    return bool(given_flags(FEATURE.options, settings))


def _why_not(context: Context) -> Sequence[str]:
    interval, break_even = context.settings.get(INTERVAL), context.settings.get(BREAK_EVEN)
    if interval is not None and interval < 1:
        raise OptionError(f"--expert-placement-freq takes a number of steps, at least 1, not {interval}.")
    if break_even is not None and not break_even >= 0:
        raise OptionError(f"--expert-placement-break-even takes a number of tokens, at least 0, not {break_even}.")
    require_first(FEATURE.options, context.settings)
    if context.host_args is None:
        return []
    reasons = [*moe.why_not("experts")(context), *moe.why_not_dispatched(context, "alltoall", "allgather")]
    ranks, experts = moe.expert_sizes(context)[1], context.arg("num_experts", None)
    if ranks == 1:
        reasons.append("--expert-model-parallel-size 1: every rank has all experts")
    elif experts and experts // ranks == 1:
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
        Option(FLAG, help="Let experts change places among the ranks that share them, as their load asks for."),
        Option(
            "--expert-placement-freq",
            help="Steps between two placements of experts (default: 50).",
            default=50,
            type=int,
            metavar="N",
        ),
        Option(
            "--expert-placement-break-even",
            help="Tokens of a step that the fullest rank must lose for each slot in which experts move (default: "
            "measured at the first placement).",
            default=None,
            type=float,
            metavar="TOKENS",
        ),
    ),
    enabled=_enabled,
    numerics="ulp",
    theme="experts",
    unsupported={"<0.16": "not trained on a release of Megatron before 0.16"},
    memory="none but a message of one expert while experts move",
    condition=_why_not,
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
            "megatron.core.optimizer.optimizer:ChainedOptimizer.step",
            _step,
            reads=("chained_optimizers",),
        ),
        Around("megatron.core.transformer.moe.experts:SequentialMLP.sharded_state_dict", _sharded_state_dict),
        Around("megatron.core.optimizer.optimizer:ChainedOptimizer.sharded_state_dict", _sharded_state_dict),
        Around("megatron.core.optimizer.optimizer:ChainedOptimizer.state_dict", _state_dict),
        Around("megatron.core.optimizer.optimizer:ChainedOptimizer.load_state_dict", _state_dict),
    ),
)
