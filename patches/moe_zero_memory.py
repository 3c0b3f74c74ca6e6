"""`--moe-zero-memory`: release expert inputs and activations, recompute them in backward.

level0 releases the experts' input rows and the activation's output. The backward pass permutes and exchanges the tokens
again and reruns the activation; the message overlaps with the experts' backward, since only the first layer's weight
gradients read the rows. level1 also releases the activation's input and reruns the first layer.
`--moe-zero-memory-num-layers N` selects level1 for the first N layers of a rank.

Reaches `dispatch_preprocess`, `dispatch_postprocess` and `token_combine` of the `alltoall` dispatcher, where tokens and
counts are kept; `TransformerLayer.__init__`, where layers are chosen; and `SharedExpertMLP`, whose activation is
released too. Needs `--moe-grouped-gemm`. Falls back for other dispatchers and for layers recomputed as a whole.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mindspeed_lite.engine import Around, Context, Feature, Option, OptionError, Relation, Session, Settings
from mindspeed_lite.memory.released import ReleasedTensor
from mindspeed_lite.parallel.expert.exchange import AllToAll
from mindspeed_lite.parallel.expert.recomputed_rows import RecomputedRows
from mindspeed_lite.platform.megatron import CONFIG

from . import recompute_activation_function
from ._shared import expert_messages, moe, recompute, released_mlp

NAME = "moe_zero_memory"
NUMBER = "moe_zero_memory_num_layers"
FLAG = "--moe-zero-memory"
_SHARED_EXPERT = "megatron.core.transformer.moe.shared_experts:SharedExpertMLP"
OFF, LEVEL0, LEVEL1 = "disable", "level0", "level1"
# Of dispatchers and shared experts that were built with the feature on: the turn of their layer, None if they keep
# everything. It stays while they live, so that the feature can be turned off and on again.
_BUILT: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()


class ReleasedExperts:
    """What one layer and micro-batch releases between its forward and its backward pass."""

    def __init__(self, rows: RecomputedRows, level: str, session: Session) -> None:
        self._rows, self.level, self._session = rows, level, session
        self._middle: ReleasedTensor | None = None
        self._again: Callable[[], torch.Tensor] | None = None

    def release(self, x: torch.Tensor, middle: torch.Tensor, out: torch.Tensor, again: Callable[[], Any]) -> None:
        """Release the rows x, and at level1 `again()` of them, until the gradient of `out` is there."""
        self._rows.release(x)
        if self.level == LEVEL1:
            self._middle, self._again = ReleasedTensor(middle), again
        if out.requires_grad:
            run = self.begin if self.level == LEVEL0 else self.compute
            out.register_hook(lambda _: run())  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """The backward pass has something to hide a message behind."""
        self._rows.leave()

    def arrive(self) -> None:
        """The rows are read now."""
        self._rows.arrive()

    def compute(self) -> None:
        """What level1 has released is read now."""
        self.arrive()
        middle, again = self._middle, self._again
        self._middle = self._again = None
        if middle is not None and again is not None:
            with torch.no_grad():
                middle.fill(again())

    def before_the_gradient(self) -> None:
        """The gradient of what was combined is there, and is about to travel."""
        self.begin()
        messages = self._session.find(expert_messages.ALLTOALL)
        if messages is not None:
            messages.messages.put(self.compute, is_certain=True)


class _State:
    """Tokens and level of dispatchers that are between their two halves, and the rows that experts are given next."""

    def __init__(self) -> None:
        self.tokens: weakref.WeakKeyDictionary[Any, tuple[torch.Tensor, str]] = weakref.WeakKeyDictionary()
        self.given: tuple[torch.Tensor, ReleasedExperts] | None = None
        self.combined: weakref.WeakKeyDictionary[Any, ReleasedExperts] = weakref.WeakKeyDictionary()
        # First halves of shared experts whose second halves are to come.
        self.shared: weakref.WeakKeyDictionary[Any, released_mlp.LinearCall] = weakref.WeakKeyDictionary()


def _state(session: Session) -> _State:
    return session.state(NAME, _State)


def taken(session: Session, rows: torch.Tensor) -> ReleasedExperts | None:
    """What experts with these rows release; None if they keep it."""
    state = session.find(NAME)
    if state is None or state.given is None:
        return None
    (given, found), state.given = state.given, None
    return found if given is rows else None


def _prepare(layer: Any, session: Session, turn: int | None) -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    dispatcher = getattr(layer.mlp, "token_dispatcher", None)
    if dispatcher is None:
        return
    reasons = _layer_reasons(lambda name: getattr(layer.config, name, None))
    if type(dispatcher) is not MoEAlltoAllTokenDispatcher:
        reasons.append(f"the dispatcher {type(dispatcher).__name__}: the rows are those of alltoall")
    if reasons:
        session.fallback(NAME, "; ".join(reasons))
    serves = not reasons and recompute.can_release(NAME, layer.config, session)
    _BUILT[dispatcher] = turn if serves else None
    shared = getattr(layer.mlp, "shared_experts", None)
    if shared is not None:
        # One that is computed again as a whole keeps nothing.
        is_whole = getattr(layer.mlp, "shared_experts_recompute", False)
        _BUILT[shared] = turn if serves and not is_whole else None


def _level(session: Session, built: Any) -> str | None:
    """The level of the layer of a dispatcher or a shared expert; None if it keeps everything."""
    if recompute.is_checkpointed(NAME, session):
        return None
    turn, level = _BUILT.get(built), session.settings[NAME]
    if built not in _BUILT:
        session.fallback(NAME, "a layer that was built before the feature was enabled")
        return None
    if recompute.is_among(turn, session.settings[NUMBER]):
        return str(level)
    return LEVEL0 if level == LEVEL1 and turn is not None else None


def _preprocess(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def dispatch_preprocess(self: Any, hidden_states: Any, routing_map: Any, probs: Any) -> Any:
        tokens = _state(session).tokens
        # Of a pass that has failed.
        tokens.pop(self, None)
        if torch.is_grad_enabled() and (level := _level(session, self)):
            tokens[self] = hidden_states.detach(), level
        return wrapped(self, hidden_states, routing_map, probs)

    return dispatch_preprocess


def _postprocess(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def dispatch_postprocess(self: Any, global_input_tokens: Any, global_probs: Any) -> Any:
        state = _state(session)
        kept = state.tokens.pop(self, None)
        if kept is None:
            return wrapped(self, global_input_tokens, global_probs)
        tokens, level = kept
        # Its counts are this micro-batch's own until the next one comes.
        counts = copy.copy(self)
        counts.shared_experts = counts.probs = None
        found = wrapped(self, global_input_tokens, global_probs)
        released = ReleasedExperts(_rows(counts, tokens), level, session)
        state.given, state.combined[self] = (found[0], released), released
        return found

    return dispatch_postprocess


def _rows(dispatcher: Any, tokens: torch.Tensor) -> RecomputedRows:
    """The rows that a dispatcher with these counts makes of its tokens [s, b, hidden]."""
    from megatron.core.transformer.moe import moe_utils

    def permute() -> torch.Tensor:
        rows: torch.Tensor = moe_utils.permute(
            tokens.view(-1, tokens.shape[-1]),
            dispatcher.routing_map,
            num_out_tokens=dispatcher.num_out_tokens,
            fused=dispatcher.config.moe_permute_fusion,
            drop_and_pad=dispatcher.drop_and_pad,
        )[0]
        return rows

    def order(received: torch.Tensor) -> torch.Tensor:
        # Megatron's own, which no feature that waits for a message stands around.
        postprocess = inspect.unwrap(type(dispatcher).dispatch_postprocess)
        rows: torch.Tensor = postprocess(dispatcher, received, received.new_zeros(len(received)))[0]
        return rows

    received, sent = (
        None if each is None else [*map(int, each)] for each in (dispatcher.output_splits, dispatcher.input_splits)
    )
    is_sent = dispatcher.ep_size > 1
    return RecomputedRows(permute, AllToAll(received, sent, dispatcher.ep_group) if is_sent else None, order)


def _combine(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def token_combine(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = wrapped(self, *args, **kwargs)
        released = _state(session).combined.pop(self, None)
        if released is not None and released.level == LEVEL1 and self.ep_size > 1 and found.requires_grad:
            found.register_hook(lambda _: released.before_the_gradient())
        return found

    return token_combine


def _shared_level(session: Session, shared: Any) -> str | None:
    """The level of a shared expert; None if it keeps everything, or is computed again by others."""
    if not torch.is_grad_enabled() or recompute_activation_function.is_recomputed(shared, session):
        return None
    return _level(session, shared)


def _release_shared(
    session: Session, shared: Any, first: released_mlp.LinearCall, second: released_mlp.LinearCall
) -> None:
    level = _shared_level(session, shared)
    if level is None:
        return
    with_input = level == LEVEL1
    if with_input and not released_mlp.runs_again(shared.linear_fc1):
        session.fallback(NAME, "a shared expert whose first layer has an adapter or a user's hook: its output is kept")
        with_input = False
    released_mlp.release(shared, first, second, with_input)


def _shared(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """A shared expert that runs as a whole."""

    def forward(self: Any, hidden_states: Any) -> Any:
        with released_mlp.seen(self.linear_fc1) as first, released_mlp.seen(self.linear_fc2) as second:
            found = wrapped(self, hidden_states)
        _release_shared(session, self, first, second)
        return found

    return forward


def _shared_first(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """The first half of one that runs beside messages."""

    def linear_fc1_forward_and_act(self: Any, *args: Any, **kwargs: Any) -> Any:
        with released_mlp.seen(self.linear_fc1) as first:
            found = wrapped(self, *args, **kwargs)
        _state(session).shared[self] = first
        return found

    return linear_fc1_forward_and_act


def _shared_second(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def linear_fc2_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with released_mlp.seen(self.linear_fc2) as second:
            found = wrapped(self, *args, **kwargs)
        first = _state(session).shared.pop(self, None)
        if first is not None:
            _release_shared(session, self, first, second)
        return found

    return linear_fc2_forward


def _layer_reasons(value_of: Callable[[str], Any]) -> list[str]:
    """What in a model's arguments leaves nothing to release, or gives experts other rows."""
    reasons = []
    if value_of("recompute_granularity") == "selective" and "moe" in (value_of("recompute_modules") or ()):
        reasons.append("--recompute-modules moe computes the layer of experts again as a whole")
    if value_of("moe_apply_probs_on_input"):
        reasons.append("--moe-apply-probs-on-input gives experts rows that are multiplied first")
    return reasons


def _enabled(settings: Settings) -> bool:
    return settings.get(NAME) not in (None, OFF) or settings.get(NUMBER) is not None


def _why_not(context: Context) -> Sequence[str]:
    level, number = context.settings.get(NAME), context.settings.get(NUMBER)
    if number is not None and level in (None, OFF):
        raise OptionError(f"{FLAG}-num-layers {number} says how many layers, and nothing what they do: add {FLAG}")
    if number is not None and number < 1:
        raise OptionError(f"{FLAG}-num-layers {number}: want how many layers of a pipeline rank, at least 1")
    if context.host_args is None:
        return []
    reasons = [*moe.why_not("experts")(context), *_layer_reasons(lambda name: context.arg(name, None))]
    return [*reasons, *moe.why_not_dispatched(context, "alltoall"), *recompute.why_whole(context)]


FEATURE = Feature(
    name=NAME,
    summary="experts' inputs and activations released after use, exchanged again and recomputed",
    options=(
        Option(
            FLAG,
            help="Release what experts are given and their activation (level0), and the activation's input (level1).",
            default=None,
            choices=(OFF, LEVEL0, LEVEL1),
            on=LEVEL0,
            metavar=f"{{{OFF},{LEVEL0},{LEVEL1}}}",
        ),
        Option(
            f"{FLAG}-num-layers",
            help="level1 for the first N layers of each pipeline rank, level0 for the others; "
            "with level0, the first N alone.",
            default=None,
            type=int,
            metavar="N",
        ),
    ),
    enabled=_enabled,
    numerics="bitwise",
    theme="memory",
    unsupported={"<0.16": "not trained on a release of Megatron before 0.16"},
    condition=_why_not,
    conflicting_args=recompute.CONFLICTING_ARGS,
    requires=(Relation("moe_grouped_gemm", "its products are the ones that read the rows"),),
    not_auto=recompute.NOT_AUTO,
    patches=(
        recompute.in_layers(_prepare, ("mlp", f"{CONFIG}.recompute_modules")),
        Around(f"{moe.DISPATCHER}.dispatch_preprocess", _preprocess),
        Around(
            f"{moe.DISPATCHER}.dispatch_postprocess",
            _postprocess,
            reads=(
                *("drop_and_pad", "ep_group", "ep_size", "input_splits", "num_out_tokens", "output_splits"),
                *("config", "probs", "routing_map", "shared_experts", f"{CONFIG}.moe_permute_fusion"),
            ),
        ),
        Around(f"{moe.DISPATCHER}.token_combine", _combine, reads=("ep_size",)),
        Around(f"{_SHARED_EXPERT}.forward", _shared, reads=("linear_fc1", "linear_fc2")),
        Around(f"{_SHARED_EXPERT}.linear_fc1_forward_and_act", _shared_first, reads=("linear_fc1",)),
        Around(f"{_SHARED_EXPERT}.linear_fc2_forward", _shared_second, reads=("linear_fc1", "linear_fc2")),
    ),
)
