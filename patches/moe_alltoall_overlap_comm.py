"""`--moe-alltoall-overlap-comm`: overlap expert all-to-alls with shared expert and wgrads.

Turns on Megatron's `--moe-shared-expert-overlap`; weight gradients of `--moe-grouped-gemm` overlap with the dispatch's
backward. Reaches `token_dispatch`, `token_combine` and their `all_to_all`, which becomes asynchronous; the places that
wait (after `linear_fc1_forward_and_act` and `linear_fc2_forward`, before both postprocess steps); and
`start_grad_sync`, the first reader of main gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_lite.engine import Around, Context, Feature, Relation, Session
from mindspeed_lite.parallel.expert.exchange import AllToAll, issue

from ._shared import moe
from ._shared.conditions import CUDA_GRAPH_ARGS, every
from ._shared.wrappers import after, before

NAME = moe.ALLTOALL
SHARED = "moe_shared_expert_overlap"
_SHARED_EXPERT = "megatron.core.transformer.moe.shared_experts:SharedExpertMLP"


def _state(session: Session) -> moe.MessageState:
    found: moe.MessageState = moe.messages_of(session, NAME)
    return found


def _all_to_all(session: Session, call: moe.AllToAllCall) -> Any:
    state = _state(session)
    if state.is_dispatch is None or call.group.size() == 1:
        return None
    received, sent = (None if each is None else [*map(int, each)] for each in (call.received, call.sent))
    return issue(call.rows, AllToAll(received, sent, call.group), state.messages, state.is_dispatch)


def _wait(session: Session, _: Any) -> None:
    _state(session).messages.wait()


def _wait_without_shared(session: Session, dispatcher: Any) -> None:
    """Up to 0.17 postprocess begins with the shared expert's GEMMs."""
    if dispatcher.shared_experts is None:
        _wait(session, dispatcher)


def _why_not(context: Context) -> list[str]:
    has_shared = context.arg("moe_shared_expert_intermediate_size", None)
    if has_shared and "shared_experts" in (context.arg("recompute_modules", None) or ()):
        return ["--recompute-modules shared_experts runs the shared expert whole, which is taken apart here"]
    return []


def _arguments(context: Context) -> Mapping[str, Any]:
    has_shared = context.host_args is not None and context.arg("moe_shared_expert_intermediate_size", None)
    return {SHARED: True} if has_shared else {}


FEATURE = Feature(
    name=NAME,
    summary="expert all-to-alls overlapped with the shared expert and weight gradients",
    numerics="ulp",
    theme="experts",
    memory="not predicted: what the weight gradients of one layer's experts read stays a message longer",
    unsupported={"<0.13": "the dispatcher of Megatron 0.12 sends and sorts tokens in one call"},
    condition=every(moe.exchanges, moe.dispatchers("alltoall"), _why_not),
    conflicting_args={
        **CUDA_GRAPH_ARGS,
        "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm overlaps the messages with another "
        "micro-batch",
    },
    conflicts=(Relation("moe_fb_overlap", "it overlaps the same messages with another micro-batch"),),
    not_auto="what it gains has been measured on CPU alone: enable it explicitly with its flag",
    arguments=_arguments,
    patches=(
        *moe.message_patches(NAME, moe.DISPATCHER),
        moe.all_to_all_patch(_all_to_all),
        Around(f"{_SHARED_EXPERT}.linear_fc1_forward_and_act", after(_wait)),
        Around(f"{_SHARED_EXPERT}.linear_fc2_forward", after(_wait)),
        *(
            patch
            for step in ("dispatch_postprocess", "combine_postprocess")
            for patch in (
                Around(f"{moe.DISPATCHER}.{step}", before(_wait), versions=">=0.18"),
                Around(
                    f"{moe.DISPATCHER}.{step}",
                    before(_wait_without_shared),
                    versions="<0.18",
                    reads=("shared_experts",),
                ),
            )
        ),
    ),
)
