"""Conditions, patches and messages shared by mixture-of-experts features."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from mindspeed_lite.engine import Around, Context, Function, Override, Relation, Session
from mindspeed_lite.parallel.expert.exchange import Messages

from .conditions import Condition, every, has_te_layers, local, needs
from .wrappers import Make, before, within

UTILS = "megatron.core.transformer.moe.moe_utils"
DISPATCHER = "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"
ALLTOALL, ALLGATHER = "moe_alltoall_overlap_comm", "moe_allgather_overlap_comm"
HOOKED = "a hook on an expert or its linear layers"
_GATHERING = "DistributedDataParallel._make_forward_pre_hook"


class Permutation(NamedTuple):
    tokens: Any
    routing_map: Any
    probs: Any
    num_out_tokens: Any
    fused: bool
    drop_and_pad: bool


class AllToAllCall(NamedTuple):
    """Arguments of Megatron's `all_to_all`; None in `received`, `sent`: equal parts."""

    group: Any
    rows: Any
    received: Any
    sent: Any


def permute_patches(serve: Callable[[Session, Function, Permutation], Any], order: int = 0) -> tuple[Override, ...]:
    """Override `permute` by `serve(session, original, call)`.

    `serve` returns (rows, probabilities, row ids), or None to run the original.
    """

    def make_of(has_padding: bool) -> Callable[[Function, Session], Function]:
        def make(wrapped: Function, session: Session) -> Function:
            def permute(
                tokens: Any,
                routing_map: Any,
                probs: Any = None,
                num_out_tokens: Any = None,
                fused: bool = False,
                drop_and_pad: bool = False,
                tokens_per_expert: Any = None,
                align_size: int = 0,
            ) -> Any:
                call = Permutation(tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad)
                pads = tokens_per_expert is not None and align_size > 0
                found = None if pads else serve(session, wrapped, call)
                if found is None:
                    return wrapped(*call, tokens_per_expert, align_size)
                return (*found, None, tokens_per_expert) if has_padding else found

            return permute

        return make

    return tuple(
        Override(f"{UTILS}:permute", make_of(has_padding), versions=versions, by_name=True, order=order)
        for has_padding, versions in ((True, ">=0.17"), (False, "<0.17"))
    )


def all_to_all_patch(serve: Callable[[Session, AllToAllCall], Any], order: int = 0) -> Override:
    """Override `all_to_all`; `serve` returns rows, or None to run the original."""

    def make(wrapped: Function, session: Session) -> Function:
        def all_to_all(
            group: Any,
            input_: Any,
            output_split_sizes_: Any = None,
            input_split_sizes: Any = None,
            use_nccl_stream: Any = False,
        ) -> Any:
            call = AllToAllCall(group, input_, output_split_sizes_, input_split_sizes)
            found = serve(session, call)
            return wrapped(*call, use_nccl_stream) if found is None else found

        return all_to_all

    return Override("megatron.core.tensor_parallel.mappings:all_to_all", make, by_name=True, order=order)


def before_gradients_are_reduced(finish: Callable[[Session], object]) -> Around:
    def act(session: Session, _: Any) -> None:
        finish(session)

    return Around(
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_grad_sync", before(act)
    )


def expert_sizes(context: Context) -> tuple[int, int]:
    """(expert tensor-parallel size, expert-parallel size)."""
    arg = context.arg
    shared = arg("expert_tensor_parallel_size", None) or arg("tensor_model_parallel_size", 1) or 1
    return shared, arg("expert_model_parallel_size", 1) or 1


has_experts = needs("num_experts", "the model has no experts")


def local_experts(theirs: str) -> Condition:
    return every(local(theirs), has_experts)


def sequential_experts(context: Context) -> list[str]:
    """Experts that are modules of their own; the local grouped experts of `moe_grouped_gemm` are too."""
    is_grouped = context.arg("moe_grouped_gemm", False)
    return local("keeps experts as weights of one layer with --moe-grouped-gemm")(context) if is_grouped else []


# Transformer Engine has its own.
GROUPED = Relation("moe_grouped_gemm", "its grouped products read the rows and compute the gradients", has_te_layers)


def grouped_experts(context: Context) -> list[str]:
    """Reasons against experts on Transformer Engine's layers that are not grouped."""
    return needs("moe_grouped_gemm", "experts in one layer are served")(context) if has_te_layers(context) else []


def dispatchers(*names: str) -> Condition:
    def condition(context: Context) -> list[str]:
        given = context.arg("moe_token_dispatcher_type", names[0])
        return [] if given in names else [f"--moe-token-dispatcher-type {given}: it takes {' or '.join(names)}"]

    return condition


def spread_experts(why: str) -> Condition:
    """Experts that several ranks share."""

    def condition(context: Context) -> list[str]:
        found = has_experts(context)
        if context.host_args is not None and not found and expert_sizes(context)[1] == 1:
            found = [f"--expert-model-parallel-size 1: {why}"]
        return found

    return condition


exchanges = spread_experts("tokens stay where they are")


def before_call(layer: Any) -> None:
    """Run the parameter-gather hook of a layer whose weight is read without a call."""
    for hook in layer._forward_pre_hooks.values():
        if _is_gathering(hook):
            hook(layer, ())


def has_hooks(module: Any) -> bool:
    """Whether a module has hooks other than those of Megatron's gather and this package."""
    kinds = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return any(not (_is_gathering(hook) or _is_own(hook)) for hooks in kinds for hook in hooks.values())


def _is_gathering(hook: Any) -> bool:
    return _GATHERING in getattr(hook, "__qualname__", "")


def _is_own(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


class MessageState:
    """Messages of expert dispatch and combine; is_dispatch: True in dispatch, False in combine, else None."""

    def __init__(self) -> None:
        self.messages = Messages()
        self.is_dispatch: bool | None = None


def messages_of(session: Session, feature: str, factory: Callable[[], Any] = MessageState) -> Any:
    found = session.find(feature)
    if found is None:
        found = session.state(feature, factory)
        session.on_end(found.messages.run_jobs)
    return found


def message_states(session: Session) -> list[Any]:
    return [state for name in (ALLTOALL, ALLGATHER) if (state := session.find(name)) is not None]


def put(session: Session, job: Callable[[], None]) -> bool:
    """Run `job`, on which no gradient depends, during the next message; False if none follows."""
    return any(each.messages.put(job) for each in message_states(session))


def run_jobs(session: Session) -> None:
    """Run jobs that overlapped with no message."""
    for each in message_states(session):
        each.messages.run_jobs()


def message_patches(feature: str, dispatcher: str) -> tuple[Around, ...]:
    """Make collectives of the dispatcher's `token_dispatch` and `token_combine` messages of this feature."""

    def tracked(is_dispatch: bool) -> Make:
        @contextlib.contextmanager
        def tracking(session: Session, _: Any) -> Iterator[None]:
            state = messages_of(session, feature)
            state.is_dispatch = is_dispatch
            state.messages.begin(is_dispatch)
            try:
                yield
            finally:
                state.is_dispatch = None

        return within(tracking)

    return (
        Around(f"{dispatcher}.token_dispatch", tracked(True)),
        Around(f"{dispatcher}.token_combine", tracked(False)),
        before_gradients_are_reduced(lambda session: messages_of(session, feature).messages.run_jobs()),
    )
