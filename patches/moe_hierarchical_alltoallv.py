"""`--moe-hierarchical-alltoallv`: tokens cross the network once per node, not per expert.

Tokens are copied, and results summed, inside the node. Reaches `permute` in `dispatch_preprocess` of the `alltoall`
dispatcher (copies per node, route as row ids), `token_dispatch` and `token_combine` (exchange by that route), and
`unpermute` (sums over nodes). Row order is unchanged. Falls back for one node or uneven nodes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from mindspeed_lite.engine import Around, Context, Feature, Function, Option, Override, Relation, Session, Settings
from mindspeed_lite.parallel.expert.hierarchy import Route, collect, padded_map, route_of, spread
from mindspeed_lite.parallel.node_groups import NodeGroups

from ._shared import moe
from ._shared.conditions import CUDA_GRAPH_ARGS, every
from ._shared.wrappers import Make, within

NAME = "moe_hierarchical_alltoallv"
NODE_SIZE = "moe_node_size"
# Where Megatron keeps `permute`'s row ids for `unpermute`.
_ROUTE = "reversed_local_input_permutation_mapping"
_NO_SIZE = "neither --moe-node-size nor the launcher (LOCAL_WORLD_SIZE) says how many ranks a node has"


class _State:
    def __init__(self) -> None:
        self.made: dict[Any, NodeGroups | None] = {}
        self.nodes: NodeGroups | None = None
        self.route: Route | None = None
        self.is_dispatch = False


def _state(session: Session) -> _State:
    return session.state(NAME, _State)


def _node_size(settings: Settings) -> int | None:
    return settings[NODE_SIZE] or int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or None


def _nodes_of(group: Any, session: Session) -> NodeGroups | None:
    made, size = _state(session).made, _node_size(session.settings)
    if group not in made:
        made[group] = None
        try:
            if size is None:
                raise ValueError(_NO_SIZE)
            made[group] = NodeGroups(group, size)
        except ValueError as error:
            session.fallback(NAME, f"{error}: tokens take one all-to-all")
    return made[group]


@contextlib.contextmanager
def _with_nodes(session: Session, dispatcher: Any) -> Iterator[None]:
    state = _state(session)
    state.nodes = _nodes_of(dispatcher.ep_group, session)
    try:
        yield
    finally:
        state.nodes = None


def _permute(session: Session, plain: Function, call: moe.Permutation) -> Any:
    nodes = _state(session).nodes
    if nodes is None:
        return None
    routing_map = call.routing_map
    if call.drop_and_pad:
        routing_map = padded_map(routing_map, call.num_out_tokens // routing_map.shape[1])
    route = route_of(routing_map, nodes)
    return spread(call.tokens, route.tokens.to_nodes), spread(call.probs.reshape(-1), route.probs.to_nodes), route


def _on_route(is_dispatch: bool) -> Make:
    @contextlib.contextmanager
    def on_route(session: Session, dispatcher: Any) -> Iterator[None]:
        state = _state(session)
        route = getattr(dispatcher, _ROUTE)
        state.route, state.is_dispatch = route if isinstance(route, Route) else None, is_dispatch
        try:
            yield
        finally:
            state.route = None

    return within(on_route)


def _all_to_all(session: Session, call: moe.AllToAllCall) -> Any:
    state = _state(session)
    if state.route is None:
        return None
    if not state.is_dispatch:
        return collect(call.rows, state.route.tokens)
    return spread(call.rows, state.route.probs if call.rows.dim() == 1 else state.route.tokens)


def _unpermute(wrapped: Function, session: Session) -> Function:
    def unpermute(permuted_tokens: Any, sorted_indices: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(sorted_indices, Route):
            return wrapped(permuted_tokens, sorted_indices, *args, **kwargs)
        return collect(permuted_tokens, sorted_indices.tokens.to_nodes)

    return unpermute


def _why_not(context: Context) -> list[str]:
    size = _node_size(context.settings)
    if size is None:
        return [_NO_SIZE]
    if context.host_args is None or moe.exchanges(context):
        return []
    tensor, experts = moe.expert_sizes(context)
    what = f"the {experts} x {tensor} ranks that share experts"
    if size % (tensor * experts) == 0:
        return [f"{what} are on one node of {size}: nothing crosses nodes"]
    if tensor * experts % size:
        return [f"{what} cannot be divided among nodes of {size}: give --moe-node-size"]
    return []


FEATURE = Feature(
    name=NAME,
    summary="experts' tokens cross the network once for each node",
    options=(
        Option("--moe-hierarchical-alltoallv"),
        Option.count(
            "--moe-node-size",
            "Processes of a node, for --moe-hierarchical-alltoallv (default: the launcher's LOCAL_WORLD_SIZE).",
        ),
    ),
    numerics="ulp",
    theme="experts",
    unsupported={"<0.16": "not trained on a release of Megatron before 0.16"},
    memory="not predicted: one row for each token and node in the place of one for each expert, on both sides",
    condition=every(_why_not, moe.exchanges, moe.dispatchers("alltoall")),
    conflicting_args=CUDA_GRAPH_ARGS,
    conflicts=(
        Relation("moe_alltoall_overlap_comm", "it takes the messages of one all-to-all apart"),
        Relation("moe_zero_memory", "it exchanges rows again by one all-to-all"),
    ),
    not_auto="what it gains has been measured on CPU alone: enable it explicitly with its flag",
    operators=("permute",),
    patches=(
        Around(f"{moe.DISPATCHER}.dispatch_preprocess", within(_with_nodes), reads=("ep_group",)),
        Around(f"{moe.DISPATCHER}.token_dispatch", _on_route(True), reads=(_ROUTE,)),
        Around(f"{moe.DISPATCHER}.token_combine", _on_route(False), reads=(_ROUTE,)),
        moe.all_to_all_patch(_all_to_all, order=1),
        # Outside of --moe-permute-fusion, which serves other calls.
        *moe.permute_patches(_permute, order=1),
        Override(f"{moe.UTILS}:unpermute", _unpermute, order=1),
    ),
)
