"""`--moe-zero-memory`: release expert inputs and activations, recompute them in backward.

level0 releases the experts' input rows and the activation's output; backward exchanges tokens again, overlapped with
the experts' backward. level1 also releases the activation's input and reruns the first layer.
`--moe-zero-memory-num-layers N`: level1 for the first N layers of a rank.

Reaches `dispatch_preprocess`, `dispatch_postprocess` and `token_combine` of the `alltoall` dispatcher,
`TransformerLayer.__init__`, `SharedExpertMLP`, and Transformer Engine's `TEGroupedMLP`. Needs `--moe-grouped-gemm`.
Falls back for other dispatchers and fully recomputed layers.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_lite.engine import Around, Context, Feature, Function, Option, OptionError, Session, Settings
from mindspeed_lite.memory.saved_tensors import ReleasedTensor
from mindspeed_lite.parallel.expert.exchange import AllToAll
from mindspeed_lite.parallel.expert.recomputed_rows import RecomputedRows
from mindspeed_lite.platform.megatron import CONFIG

from . import recompute_activation_function
from ._shared import linear_layers, moe, recompute
from ._shared.conditions import every
from ._shared.proxies import LinearCall, run_activation, seen

NAME = "moe_zero_memory"
NUMBER = "moe_zero_memory_num_layers"
FLAG = "--moe-zero-memory"
_SHARED_EXPERT = "megatron.core.transformer.moe.shared_experts:SharedExpertMLP"
OFF, LEVEL0, LEVEL1 = "disable", "level0", "level1"
# Dispatchers and shared experts -> recompute index of their layer, None if they keep everything. Survives turning the
# feature off and on.
_BUILT: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()


class ReleasedExperts:
    """Released tensors of one layer and micro-batch until its backward pass."""

    def __init__(self, rows: RecomputedRows, level: str, session: Session) -> None:
        self.rows, self.level, self._session = rows, level, session
        self._middle: ReleasedTensor | None = None
        self._again: Callable[[], Tensor] | None = None

    def release(self, x: Tensor, middle: Tensor, out: Tensor, again: Callable[[], Any]) -> None:
        """Release rows x, and at level1 `middle`, which `again()` recomputes, until `out` has a gradient."""
        self.rows.release(x)
        if self.level == LEVEL1:
            self._middle, self._again = ReleasedTensor(middle), again
        if out.requires_grad:
            run = self.rows.leave if self.level == LEVEL0 else self.compute
            out.register_hook(lambda _: run())  # type: ignore[no-untyped-call]

    def compute(self) -> None:
        """Recompute what level1 has released."""
        self.rows.arrive()
        middle, again = self._middle, self._again
        self._middle = self._again = None
        if middle is not None and again is not None:
            with torch.no_grad():
                middle.fill(again())

    def before_the_gradient(self) -> None:
        """Called just before the gradient of the combined output is sent."""
        self.rows.leave()
        messages = self._session.find(moe.ALLTOALL)
        if messages is not None:
            messages.messages.put(self.compute, is_certain=True)


class _State:
    def __init__(self) -> None:
        self.tokens: weakref.WeakKeyDictionary[Any, tuple[Tensor, str]] = weakref.WeakKeyDictionary()
        self.given: tuple[Tensor, ReleasedExperts] | None = None
        self.combined: weakref.WeakKeyDictionary[Any, ReleasedExperts] = weakref.WeakKeyDictionary()
        self.shared: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _state(session: Session) -> _State:
    return session.state(NAME, _State)


def released_of(session: Session, rows: Tensor) -> ReleasedExperts | None:
    """The release for these rows; None if the experts keep everything."""
    state = session.find(NAME)
    if state is None or state.given is None:
        return None
    (given, found), state.given = state.given, None
    return found if given is rows else None


def _prepare(layer: Any, session: Session, index: int | None) -> None:
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
    _BUILT[dispatcher] = index if serves else None
    shared = getattr(layer.mlp, "shared_experts", None)
    if shared is not None:
        is_whole = getattr(layer.mlp, "shared_experts_recompute", False)
        _BUILT[shared] = index if serves and not is_whole else None


def _level(session: Session, built: Any) -> str | None:
    if recompute.is_checkpointed(NAME, session):
        return None
    index, level = _BUILT.get(built), session.settings[NAME]
    if built not in _BUILT:
        session.fallback(NAME, "a layer that was built before the feature was enabled")
        return None
    if recompute.is_among(index, session.settings[NUMBER]):
        return str(level)
    return LEVEL0 if level == LEVEL1 and index is not None else None


def _preprocess(wrapped: Function, session: Session) -> Function:
    def dispatch_preprocess(self: Any, hidden_states: Any, routing_map: Any, probs: Any) -> Any:
        tokens = _state(session).tokens
        tokens.pop(self, None)
        if torch.is_grad_enabled() and (level := _level(session, self)):
            tokens[self] = hidden_states.detach(), level
        return wrapped(self, hidden_states, routing_map, probs)

    return dispatch_preprocess


def _postprocess(wrapped: Function, session: Session) -> Function:
    def dispatch_postprocess(self: Any, global_input_tokens: Any, global_probs: Any) -> Any:
        state = _state(session)
        kept = state.tokens.pop(self, None)
        if kept is None:
            return wrapped(self, global_input_tokens, global_probs)
        tokens, level = kept
        # The next micro-batch overwrites the counts.
        counts = copy.copy(self)
        counts.shared_experts = counts.probs = None
        found = wrapped(self, global_input_tokens, global_probs)
        released = ReleasedExperts(_rows(counts, tokens), level, session)
        state.given, state.combined[self] = (found[0], released), released
        return found

    return dispatch_postprocess


def _rows(dispatcher: Any, tokens: Tensor) -> RecomputedRows:
    """Rows that the dispatcher makes of tokens [s, b, hidden]."""
    from megatron.core.transformer.moe import moe_utils

    def permute() -> Tensor:
        rows: Tensor = moe_utils.permute(
            tokens.view(-1, tokens.shape[-1]),
            dispatcher.routing_map,
            num_out_tokens=dispatcher.num_out_tokens,
            fused=dispatcher.config.moe_permute_fusion,
            drop_and_pad=dispatcher.drop_and_pad,
        )[0]
        return rows

    def order(received: Tensor) -> Tensor:
        # Megatron's own, without features that wait for messages.
        postprocess = inspect.unwrap(type(dispatcher).dispatch_postprocess)
        rows: Tensor = postprocess(dispatcher, received, received.new_zeros(len(received)))[0]
        return rows

    received, sent = (
        None if each is None else [*map(int, each)] for each in (dispatcher.output_splits, dispatcher.input_splits)
    )
    is_sent = dispatcher.ep_size > 1
    return RecomputedRows(permute, AllToAll(received, sent, dispatcher.ep_group) if is_sent else None, order)


def _te_experts(wrapped: Function, session: Session) -> Function:
    """Megatron recomputes the activation; the rest is released here."""

    def forward(self: Any, permuted_local_hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        released = released_of(session, permuted_local_hidden_states)
        if released is None:
            return wrapped(self, permuted_local_hidden_states, *args, **kwargs)
        layer, call = self.linear_fc1, LinearCall()
        with recompute_activation_function.grouped_activation(self), seen(layer, call):
            out, bias = wrapped(self, permuted_local_hidden_states, *args, **kwargs)
        x, middle = permuted_local_hidden_states.detach(), call.output
        if call.input is not permuted_local_hidden_states or middle is None or not middle.requires_grad:
            return out, bias
        # Autograd reads the rows for this gradient's product, and has it before.
        middle.register_hook(lambda _: released.rows.arrive())  # type: ignore[no-untyped-call]
        # Its hook runs before that of Megatron's recomputation.
        out = out.view_as(out)
        released.release(x, middle, out, lambda: type(layer).forward(layer, x, *call.rest)[0])
        return out, bias

    return forward


def _combine(wrapped: Function, session: Session) -> Function:
    def token_combine(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = wrapped(self, *args, **kwargs)
        released = _state(session).combined.pop(self, None)
        if released is not None and released.level == LEVEL1 and self.ep_size > 1 and found.requires_grad:
            found.register_hook(lambda _: released.before_the_gradient())
        return found

    return token_combine


def _is_deterministic(layer: Any) -> bool:
    """Whether a linear layer is repeatable; adapters may have dropout."""
    return linear_layers.is_column_parallel(layer) and not layer._forward_hooks


def release_mlp(mlp: Any, first: LinearCall, second: LinearCall, with_input: bool) -> None:
    """Release the activation's output until the second layer's gradient; rerun it then.

    with_input: also release the activation's input and rerun the first layer.
    """
    from megatron.core.transformer.mlp import MLP

    x, before, after, out = first.input, first.output, second.input, second.output
    if x is None or before is None or after is None or out is None or not out.requires_grad:
        return
    if before.untyped_storage()._cdata == after.untyped_storage()._cdata:
        # An in-place activation has overwritten its input.
        return
    x, before = x.detach(), before.detach()
    waiting = [(ReleasedTensor(after), ReleasedTensor(before) if with_input else None, x, before)]

    def fill(_: Tensor) -> None:
        if not waiting:
            return
        output, input_, x, before = waiting.pop()
        with torch.no_grad():
            if input_ is not None:
                layer = mlp.linear_fc1
                # Without hooks: its parameters are gathered.
                input_.fill(type(layer).forward(layer, x)[0])
            output.fill(run_activation(MLP.forward, mlp, before))

    out.register_hook(fill)  # type: ignore[no-untyped-call]


def _shared_level(session: Session, shared: Any) -> str | None:
    if not torch.is_grad_enabled() or recompute_activation_function.is_recomputed(shared, session):
        return None
    return _level(session, shared)


def _release_shared(session: Session, shared: Any, first: LinearCall, second: LinearCall) -> None:
    level = _shared_level(session, shared)
    if level is None:
        return
    with_input = level == LEVEL1
    if with_input and not _is_deterministic(shared.linear_fc1):
        session.fallback(NAME, "a shared expert whose first layer has an adapter or a user's hook: its output is kept")
        with_input = False
    release_mlp(shared, first, second, with_input)


def _shared(wrapped: Function, session: Session) -> Function:
    """Wrapper of the shared expert's forward, or of its two layers if they overlap messages."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        shared = _state(session).shared
        first, second = shared.pop(self, None) or (LinearCall(), LinearCall())
        with seen(self.linear_fc1, first), seen(self.linear_fc2, second):
            found = wrapped(self, *args, **kwargs)
        if second.output is None:
            shared[self] = first, second
        else:
            _release_shared(session, self, first, second)
        return found

    return method


def _layer_reasons(value_of: Callable[[str], Any]) -> list[str]:
    reasons = []
    if value_of("recompute_granularity") == "selective" and "moe" in (value_of("recompute_modules") or ()):
        reasons.append("--recompute-modules moe computes the layer of experts again as a whole")
    if value_of("moe_apply_probs_on_input"):
        reasons.append("--moe-apply-probs-on-input gives experts rows that are multiplied first")
    return reasons


def _enabled(settings: Settings) -> bool:
    return settings.get(NAME) not in (None, OFF) or settings.get(NUMBER) is not None


def _why_not(context: Context) -> list[str]:
    level, number = context.settings.get(NAME), context.settings.get(NUMBER)
    if number is not None and level in (None, OFF):
        raise OptionError(f"{FLAG}-num-layers {number} says how many layers, and nothing what they do: add {FLAG}")
    if context.host_args is None:
        return []
    return _layer_reasons(lambda name: context.arg(name, None))


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
        Option.count(
            f"{FLAG}-num-layers",
            "level1 for the first N layers of each pipeline rank, level0 for the others; "
            "with level0, the first N alone.",
        ),
    ),
    enabled=_enabled,
    numerics="bitwise",
    theme="memory",
    unsupported={"<0.16": "not trained on a release of Megatron before 0.16"},
    condition=every(
        _why_not, moe.has_experts, moe.grouped_experts, moe.dispatchers("alltoall"), recompute.not_full_recompute
    ),
    conflicting_args=recompute.CONFLICTING_ARGS,
    requires=(moe.GROUPED,),
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
        Around(
            "megatron.core.transformer.moe.experts:TEGroupedMLP.forward",
            _te_experts,
            reads=("activation_recompute", "linear_fc1"),
        ),
        Around(f"{moe.DISPATCHER}.token_combine", _combine, reads=("ep_size",)),
        *(
            Around(f"{_SHARED_EXPERT}.{name}", _shared, reads=("linear_fc1", "linear_fc2"))
            for name in ("forward", "linear_fc1_forward_and_act", "linear_fc2_forward")
        ),
    ),
)
