"""`--balanced-moe-experts`: copy the hottest experts of a micro-batch to every rank.

Tokens of a copied expert stay on their rank, if that saves more than a copy costs. Gradients are added to the owner's
main gradients. Reaches `MoEAlltoAllTokenDispatcher.dispatch_preprocess` (routing over experts and copies),
`SequentialMLP.forward` (computes copies) and `MoELayer.forward` (links both). Leaves parameters, optimizer and
checkpoints alone. Falls back for other or frozen experts, fp8 and fp4.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch

from mindspeed_lite.engine import Around, Feature, Function, Option, Override, Relation, Session
from mindspeed_lite.parallel.balance import placement
from mindspeed_lite.parallel.balance.copies import (
    CopyPlan,
    ExpertCopies,
    PendingGradients,
    Slots,
    gather_counts,
    measure_costs,
)
from mindspeed_lite.parallel.balance.placement import hot_experts
from mindspeed_lite.platform.megatron import CONFIG

from ._shared import moe
from ._shared.conditions import CUDA_GRAPH_ARGS, FSDP_ARGS, config_reasons, every, holding
from ._shared.proxies import AttributeOverride
from ._shared.wrappers import before

NAME, FLAG = "balanced_moe_experts", "--balanced-moe-experts"
NUMBER = "balanced_moe_hot_expert_num"
BREAK_EVEN = "balanced_moe_break_even"
_SIZES = (
    "num_experts",
    "num_local_experts",
    "local_expert_indices",
    "sort_input_by_local_experts",
    "restore_output_by_local_experts",
)
_PADS = {
    "moe_pad_expert_input_to_capacity": "--moe-pad-expert-input-to-capacity gives all experts as many tokens",
    "moe_router_padding_for_quantization": "the dispatcher pads the tokens of each expert",
}


class _State:
    def __init__(self, session: Session) -> None:
        self.session = session
        self.experts: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.built: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        self.copies: weakref.WeakKeyDictionary[Any, ExpertCopies] = weakref.WeakKeyDictionary()
        self.pending = PendingGradients()
        self.break_even: dict[tuple[int, ...], float] = {}
        session.on_end(self.end)

    def end(self) -> None:
        self.pending.close()
        for dispatcher, sizes in self.built.items():
            vars(dispatcher).update(sizes)

    def experts_of(self, dispatcher: Any) -> Any:
        """Experts of a dispatcher; None, with the reason logged, if they are not copied."""
        experts = self.experts.get(dispatcher)
        reasons = ["its layer is not known"] if experts is None else _reasons_of(experts)
        if reasons:
            self.session.fallback(NAME, "; ".join(reasons))
        return None if reasons else experts


def _state(session: Session) -> _State:
    return session.state(NAME, lambda: _State(session))


def _reasons_of(experts: Any) -> list[str]:
    from megatron.core.transformer.moe.experts import SequentialMLP

    if type(experts) is not SequentialMLP:
        return [f"experts are a {type(experts).__name__}: copies are made of SequentialMLP's"]
    is_narrow = bool(experts.config.fp8) or bool(getattr(experts.config, "fp4", None))
    found = ["experts compute in fp8 or fp4"] if is_narrow else []
    return found + config_reasons(_PADS, experts.config)


def _reasons_of_rank(experts: Any) -> list[str]:
    parameters = [*experts.parameters()]
    reasons = {
        "a frozen parameter of an expert": not all(each.requires_grad for each in parameters),
        "parameters of experts of several dtypes": len({each.dtype for each in parameters}) > 1,
        # A hook would see only the tokens that stay on its rank.
        moe.HOOKED: any(map(moe.has_hooks, (each for expert in experts.local_experts for each in expert.modules()))),
    }
    return holding(reasons)


def _link_experts(session: Session, layer: Any) -> None:
    _state(session).experts[layer.token_dispatcher] = layer.experts


def _preprocess(wrapped: Function, session: Session) -> Function:
    def dispatch_preprocess(self: Any, hidden_states: Any, routing_map: Any, probs: Any) -> Any:
        state = _state(session)
        built = state.built.setdefault(self, {name: getattr(self, name) for name in _SIZES})
        vars(self).update(built)
        experts = state.experts_of(self)
        if experts is not None:
            slots = _choose(state, self, built, experts, routing_map)
            state.copies.pop(experts, None)
            if slots.copied:
                vars(self).update(_sizes(self, built, slots))
                state.copies[experts] = _copy(state, self, experts, slots)
                routing_map, probs = slots.route(routing_map, probs, self.ep_group.rank())
        return wrapped(self, hidden_states, routing_map, probs)

    return dispatch_preprocess


def _choose(state: _State, dispatcher: Any, built: dict[str, Any], experts: Any, routing_map: torch.Tensor) -> Slots:
    for expert in experts.local_experts:
        for layer in (expert.linear_fc1, expert.linear_fc2):
            # With overlapped gathers, parameters are first read here.
            moe.before_call(layer)
    ranks, local = dispatcher.ep_size, built["num_local_experts"]
    reasons = _reasons_of_rank(experts)
    counts, is_refused = gather_counts(routing_map, ranks, dispatcher.tp_ep_group, bool(reasons))
    if is_refused:
        state.session.fallback(NAME, "; ".join(reasons) or "another rank that shares the experts makes no copies")
        return Slots(ranks, local, ())
    placed = placement.contiguous(ranks * local, ranks)
    price = _break_even(state, dispatcher, experts, sum(map(sum, counts)) // (ranks * local))
    number = min(state.session.settings[NUMBER], ranks * local)
    return Slots(ranks, local, tuple(hot_experts(counts, placed, number, price)))


def _break_even(state: _State, dispatcher: Any, experts: Any, rows: int) -> float:
    given: float | None = state.session.settings[BREAK_EVEN]
    if given is not None:
        return given
    parameters = [*experts.local_experts[0].parameters()]
    key = tuple(each.numel() for each in parameters)
    if key not in state.break_even:
        costs = measure_costs(parameters, rows, dispatcher.ep_group, dispatcher.tp_ep_group)
        state.break_even[key] = costs.break_even
        state.session.log_decision(
            f"{NAME}: a copy takes {1e3 * costs.copy:.2f} ms, a token {1e6 * costs.products:.1f} us of products and "
            f"{1e6 * costs.messages:.1f} us of messages: copies are made that take {costs.break_even:.0f} tokens "
            "off the fullest rank (--balanced-moe-break-even N fixes it)"
        )
    return state.break_even[key]


def _sizes(dispatcher: Any, built: dict[str, Any], slots: Slots) -> dict[str, Any]:
    places = slots.local + len(slots.copied)
    first = dispatcher.ep_group.rank() * places
    device = built["sort_input_by_local_experts"].device
    chunks = torch.arange(slots.ranks * places * dispatcher.tp_size, device=device)
    return {
        "num_experts": slots.ranks * places,
        "num_local_experts": places,
        "local_expert_indices": [*range(first, first + places)],
        "sort_input_by_local_experts": chunks.view(-1, places).t().flatten(),
        "restore_output_by_local_experts": chunks.view(places, -1).t().flatten(),
    }


def _copy(state: _State, dispatcher: Any, experts: Any, slots: Slots) -> ExpertCopies:
    rank, first = dispatcher.ep_group.rank(), dispatcher.ep_group.rank() * slots.local
    like = [*experts.local_experts[0].parameters()]
    plan = CopyPlan(
        slots.owners,
        like,
        dispatcher.ep_group,
        state.pending,
        bool(experts.config.gradient_accumulation_fusion) and hasattr(like[0], "main_grad"),
        lambda: moe.run_jobs(state.session),
    )
    return plan.make(
        [
            [*experts.local_experts[expert - first].parameters()] if owner == rank else None
            for expert, owner in zip(slots.copied, slots.owners, strict=True)
        ]
    )


def _experts(wrapped: Function, session: Session) -> Function:
    def forward(
        self: Any, permuted_local_hidden_states: Any, tokens_per_expert: Any, permuted_probs: Any
    ) -> tuple[Any, Any]:
        given = (permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        copies = _state(session).copies.pop(self, None)
        if copies is None:
            return wrapped(self, *given)  # type: ignore[no-any-return]
        copies.wait()
        own = list(self.local_experts)
        places = own + [_with_parameters(own[0], iter(copies.of(number))) for number in range(len(copies))]
        return wrapped(  # type: ignore[no-any-return]
            AttributeOverride(self, local_experts=places, num_local_experts=len(places)), *given
        )

    return forward


def _with_parameters(module: Any, parameters: Iterator[torch.Tensor]) -> Any:
    found = copy.copy(module)
    vars(found).update(
        _parameters={name: None if each is None else next(parameters) for name, each in module._parameters.items()},
        _modules={
            name: None if each is None else _with_parameters(each, parameters) for name, each in module._modules.items()
        },
        _forward_hooks=OrderedDict(),
        _forward_pre_hooks=OrderedDict(),
    )
    return found


FEATURE = Feature(
    name=NAME,
    summary="the hottest experts are copied to every rank for a micro-batch, where that pays",
    options=(
        Option(FLAG),
        Option.count("--balanced-moe-hot-expert-num", "Experts of a layer that are copied, at most (default: 3).", 3),
        Option.amount(
            "--balanced-moe-break-even",
            "Tokens that a copy must take off the fullest rank to be made (default: measured at the first "
            "micro-batch).",
            "TOKENS",
        ),
    ),
    numerics="ulp",
    theme="experts",
    unsupported={"<0.16": "not trained on a release of Megatron before 0.16"},
    condition=every(
        moe.sequential_experts, moe.spread_experts("every rank has all experts"), moe.dispatchers("alltoall")
    ),
    conflicting_args={
        **CUDA_GRAPH_ARGS,
        **dict.fromkeys(FSDP_ARGS, "FSDP holds shards of the experts' parameters, which are copied whole"),
        **_PADS,
        "fp8": "--fp8-format keeps the weights of a layer's own experts in fp8, not those of copies",
        "fp4": "--fp4-format keeps the weights of a layer's own experts in fp4, not those of copies",
        "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm calls parts of the layer",
        "delay_wgrad_compute": "--delay-wgrad-compute: gradients of copies are sent in the backward pass",
    },
    conflicts=(
        Relation("delay_wgrad_compute", "gradients of copies are sent in the backward pass"),
        Relation("moe_alltoall_mc2", "its operators send over one group and multiply by a rank's own experts"),
        Relation("moe_fb_overlap", "it calls parts of the layer, and delays weight gradients"),
        Relation("moe_wgrad_side_stream", "gradients of copies are sent in the backward pass"),
    ),
    not_auto="what it gains depends on the skew of the router: enable it with its flag",
    patches=(
        Around(
            "megatron.core.transformer.moe.moe_layer:MoELayer.forward",
            before(_link_experts),
            reads=("experts", "token_dispatcher"),
        ),
        Override(
            f"{moe.DISPATCHER}.dispatch_preprocess",
            _preprocess,
            reads=(*_SIZES, "ep_group", "ep_size", "tp_ep_group", "tp_size"),
            order=1,
        ),
        # Outside of --moe-grouped-gemm.
        Override(
            "megatron.core.transformer.moe.experts:SequentialMLP.forward",
            _experts,
            reads=(f"{CONFIG}.gradient_accumulation_fusion",),
            order=1,
        ),
        moe.before_gradients_are_reduced(lambda session: _state(session).pending.finish()),
    ),
)
