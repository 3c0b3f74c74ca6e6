"""Conditions, patches and verification shared by mixture-of-experts features."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mindspeed_lite.engine import Around, Context, Feature, Function, Override, Session

from .conditions import transformer_engine_reasons
from .wrappers import before

UTILS = "megatron.core.transformer.moe.moe_utils"
DISPATCHER = "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"
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


def no_expert_reasons(context: Context) -> list[str]:
    has_none = context.host_args is not None and not context.arg("num_experts", None)
    return ["--num-experts is not given: the model has no experts"] if has_none else []


def dispatcher_reasons(context: Context, *dispatchers: str) -> list[str]:
    given = context.arg("moe_token_dispatcher_type", dispatchers[0])
    return [] if given in dispatchers else [f"--moe-token-dispatcher-type {given}: it takes {' or '.join(dispatchers)}"]


def exchange_reasons(context: Context) -> list[str]:
    found = no_expert_reasons(context)
    if context.host_args is not None and not found and expert_sizes(context)[1] == 1:
        found = ["--expert-model-parallel-size 1: tokens stay where they are"]
    return found


def local_expert_reasons(theirs: str) -> Callable[[Context], list[str]]:
    return lambda context: [
        *transformer_engine_reasons(context, f"has {theirs} of its own"),
        *no_expert_reasons(context),
    ]


def turn_on(argument: str) -> Callable[[Context], Mapping[str, Any]]:
    def adjust(context: Context) -> Mapping[str, Any]:
        return {} if context.host_args is None else {argument: True}

    return adjust


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


def compare(
    session: Session,
    feature: Feature,
    operator: str,
    ours: Function,
    theirs: Function,
    inputs: Mapping[str, Any],
    against: str = "Megatron's function",
    widened: bool = True,
    variant: str = "",
) -> None:
    """Verify an operator whose number of rows varies.

    widened: measure both against `theirs` in a wider type.
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
