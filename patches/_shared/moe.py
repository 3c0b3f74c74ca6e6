"""Shares condition, argument adjustment, seams and verification among the features for mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mindspeed_lite.engine import Around, Context, Feature, Override, Session

UTILS = "megatron.core.transformer.moe.moe_utils"
DISPATCHER = "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"
HOOKED = "a hook on an expert or its linear layers"
# What makes the hook of --overlap-param-gather, in every release since 0.12.
_GATHERING = "DistributedDataParallel._make_forward_pre_hook"


class Permutation(NamedTuple):
    """What Megatron's `permute` is called with, in order."""

    tokens: Any
    routing_map: Any
    probs: Any
    num_out_tokens: Any
    fused: bool
    drop_and_pad: bool


class AllToAllCall(NamedTuple):
    """What Megatron's `all_to_all` is called with; `received` and `sent` are rows by rank, None for equal parts."""

    group: Any
    rows: Any
    received: Any
    sent: Any


def permute_patches(
    serve: Callable[[Session, Callable[..., Any], Permutation], Any], order: int = 0
) -> tuple[Override, ...]:
    """Overrides `permute` of every release.

    Args:
        serve: (session, Megatron's function, call) -> (rows, probabilities, row ids); None where Megatron's is to run,
            which pads an expert's rows to a tile itself.
    """

    def make_of(has_padding: bool) -> Callable[[Callable[..., Any], Session], Callable[..., Any]]:
        def make(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
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
    """Overrides the dispatchers' `all_to_all`; `serve` returns the rows, or None where Megatron's is to run."""

    def make(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
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
    """Calls `finish` before the first reader of main gradients."""

    def make(wrapped: Callable[..., None], session: Session) -> Callable[..., None]:
        def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
            finish(session)
            wrapped(self, *args, **kwargs)

        return start_grad_sync

    return Around("megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_grad_sync", make)


def expert_sizes(context: Context) -> tuple[int, int]:
    """The ranks that share an expert, and those that experts are divided among."""
    arg = context.arg
    shared = arg("expert_tensor_parallel_size", None) or arg("tensor_model_parallel_size", 1) or 1
    return shared, arg("expert_model_parallel_size", 1) or 1


def why_no_experts(context: Context) -> list[str]:
    """The reason of a feature that is about experts."""
    has_none = context.host_args is not None and not context.arg("num_experts", None)
    return ["--num-experts is not given: the model has no experts"] if has_none else []


def why_not_dispatched(context: Context, *dispatchers: str) -> list[str]:
    """The reason of a feature that is written for these dispatchers alone."""
    given = context.arg("moe_token_dispatcher_type", dispatchers[0])
    return [] if given in dispatchers else [f"--moe-token-dispatcher-type {given}: it takes {' or '.join(dispatchers)}"]


def why_not_sent(context: Context) -> list[str]:
    """The reason of a feature that is about the messages between the ranks that experts are divided among."""
    found = why_no_experts(context)
    if context.host_args is not None and not found and expert_sizes(context)[1] == 1:
        found = ["--expert-model-parallel-size 1: tokens stay where they are"]
    return found


def why_not(theirs: str) -> Callable[[Context], list[str]]:
    """The condition of a feature beside whose place Transformer Engine has `theirs`."""

    def reasons(context: Context) -> list[str]:
        found = []
        if context.arg("transformer_impl", "local") == "transformer_engine":
            found.append(f"--transformer-impl transformer_engine has {theirs} of its own")
        return found + why_no_experts(context)

    return reasons


def turn_on(argument: str) -> Callable[[Context], Mapping[str, Any]]:
    """Sets Megatron's own argument, by which its configuration asks for the fused form."""

    def adjust(context: Context) -> Mapping[str, Any]:
        return {} if context.host_args is None else {argument: True}

    return adjust


def before_call(layer: Any) -> None:
    """Wait for the parameters of a linear layer that is read and not called, as its hook does (--overlap-param-gather).

    `has_hooks` tells of others.
    """
    for hook in layer._forward_pre_hooks.values():
        if _is_gathering(hook):
            hook(layer, ())


def has_hooks(module: Any) -> bool:
    """Whether a module has hooks besides Megatron's for --overlap-param-gather and those of this package."""
    kinds = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return any(not (_is_gathering(hook) or _is_own(hook)) for hooks in kinds for hook in hooks.values())


def _is_gathering(hook: Any) -> bool:
    return _GATHERING in getattr(hook, "__qualname__", "")


def _is_own(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


def compare(
    session: Session,
    feature: Feature,
    operator: str,
    ours: Callable[..., Any],
    theirs: Callable[..., Any],
    inputs: Mapping[str, Any],
    against: str = "Megatron's function",
    widened: bool = True,
    variant: str = "",
) -> None:
    """Have the session's verifier compare an operator whose number of rows each batch decides.

    widened: whether both are measured from `theirs` in a wider type.
    """
    session.verifier.check(
        feature.name,
        operator,
        feature.numerics,
        ours,
        theirs,
        inputs,
        against=against,
        widened=widened,
        variant=variant,
        sizes_vary=True,
    )
