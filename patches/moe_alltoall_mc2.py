"""`--moe-alltoall-mc2`: all-to-all and expert GEMM in one NPU operator.

Reaches `token_dispatch` and `token_combine` of the `alltoall` dispatcher, whose `all_to_all` passes token rows through,
and `dispatch_postprocess` and `combine_preprocess`, which sort probabilities alone. Needs `--moe-grouped-gemm`. Falls
back for unsupported sizes.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mindspeed_lite.engine import Around, Context, Feature, Function, OptionError, Override, Relation, Session
from mindspeed_lite.parallel.expert.alltoall_mc2 import AlltoAllMC2, ExpertCounts, RowsOfRank

from ._shared import moe
from ._shared.conditions import CUDA_GRAPH_ARGS, every
from ._shared.wrappers import within

NAME = "moe_alltoall_mc2"
_OPERATORS = ("npu_alltoallv_gmm", "npu_gmm_alltoallv")


class _State:
    def __init__(self) -> None:
        self.exchange: AlltoAllMC2 | None = None
        self.left = 0
        self.is_dispatcher_call = False

    @contextlib.contextmanager
    def dispatcher_call(self) -> Iterator[None]:
        self.is_dispatcher_call = True
        try:
            yield
        finally:
            self.is_dispatcher_call = False


def _state(session: Session) -> _State:
    return session.state(NAME, _State)


def product_of(session: Session) -> Function | None:
    """Fused GEMM of the next linear layer (rows, weights, take_gradients), or None.

    The first layer's receives the rows, the second's sends them back.
    """
    state: _State | None = session.find(NAME)
    if state is None or state.exchange is None or not state.left:
        return None
    state.left -= 1
    return state.exchange.dispatch_linear if state.left else state.exchange.linear_combine


def _dispatch(wrapped: Function, session: Session) -> Function:
    def token_dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = _state(session)
        with state.dispatcher_call():
            found = wrapped(self, *args, **kwargs)
        # The dispatcher has waited for these counts.
        received = self.num_global_tokens_per_local_expert if self.num_local_experts > 1 else self.output_splits
        counts = ExpertCounts(
            self.routing_map.sum(0).tolist(), [*map(int, torch.as_tensor(received).flatten().tolist())]
        )
        rows = RowsOfRank.of_group(counts, self.ep_group, self.routing_map.device)
        state.exchange = AlltoAllMC2(self.ep_group, counts, rows, session.fallback_of(NAME))
        state.left = 2
        return found

    return token_dispatch


def _dispatcher_call(session: Session, _: Any) -> contextlib.AbstractContextManager[None]:
    return _state(session).dispatcher_call()


def check_exchanged(session: Session, reasons: Sequence[str] = ()) -> None:
    """Raise OptionError if the experts compute without the fused exchange."""
    state: _State | None = session.find(NAME)
    if state is not None and state.left:
        why = "; ".join(reasons) or "its reason was logged"
        raise OptionError(
            f"{NAME}: the experts do not compute with --moe-grouped-gemm ({why}), so that no token is exchanged: leave "
            "--moe-alltoall-mc2 out."
        )


def _call_after_experts(session: Session, dispatcher: Any) -> contextlib.AbstractContextManager[None]:
    check_exchanged(session)
    return _dispatcher_call(session, dispatcher)


def _all_to_all(session: Session, call: moe.AllToAllCall) -> Any:
    return call.rows if _state(session).is_dispatcher_call and call.rows.dim() == 2 else None


def _sort_chunks(wrapped: Function, session: Session) -> Function:
    def sort_chunks_by_idxs(
        input: Any, split_sizes: Any, sorted_idxs: Any, probs: Any = None, fused: bool = False
    ) -> Any:
        if not _state(session).is_dispatcher_call:
            return wrapped(input, split_sizes, sorted_idxs, probs, fused)
        if probs is None:
            return input, None
        return input, wrapped(probs.unsqueeze(-1), split_sizes, sorted_idxs, None, fused)[0].squeeze(-1)

    return sort_chunks_by_idxs


def _why_not_here(device: str) -> list[str]:
    if device != "npu":
        return [f"the operators are CANN's, for an NPU, and the device is {device}: --moe-alltoall-overlap-comm"]
    if importlib.util.find_spec("torch_npu") is None:
        return ["torch_npu is not installed"]
    import torch_npu  # type: ignore[import-not-found, import-untyped, unused-ignore]

    missing = [name for name in _OPERATORS if not hasattr(torch_npu, name)]
    return [f"this torch_npu has no {' and no '.join(missing)}: install a newer one"] if missing else []


def _why_not(context: Context) -> list[str]:
    reasons = _why_not_here(context.device)
    if moe.expert_sizes(context)[0] > 1:
        reasons.append("experts are split over tensor-parallel ranks: --expert-tensor-parallel-size 1")
    return reasons


FEATURE = Feature(
    name=NAME,
    summary="experts' exchange and their products in one operator of an NPU",
    numerics="ulp",
    theme="experts",
    unsupported={"<0.16": "not trained on a release of Megatron before 0.16"},
    memory="not predicted: never measured on a device",
    condition=every(_why_not, moe.exchanges, moe.dispatchers("alltoall")),
    conflicting_args={
        **CUDA_GRAPH_ARGS,
        "add_bias_linear": "experts have biases, which the operators do not add: --disable-bias-linear",
        "moe_expert_capacity_factor": "--moe-expert-capacity-factor: dropped and padded rows have never been sent "
        "through the operators",
        "moe_apply_probs_on_input": "--moe-apply-probs-on-input weighs rows before they have arrived",
        "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm takes exchange and products apart",
    },
    requires=(Relation("moe_grouped_gemm", "its products are those that the operators do"),),
    conflicts=(
        Relation("moe_alltoall_overlap_comm", "it hides the messages that the operators send"),
        Relation("moe_hierarchical_alltoallv", "the operators send over one group"),
        Relation("moe_fb_overlap", "it takes exchange and products apart"),
        Relation("moe_zero_memory", "it exchanges rows again by an all-to-all of its own"),
    ),
    not_auto="it has never been timed on a device: enable it explicitly with its flag",
    patches=(
        Around(
            f"{moe.DISPATCHER}.token_dispatch",
            _dispatch,
            reads=(
                "ep_group",
                "num_global_tokens_per_local_expert",
                "num_local_experts",
                "output_splits",
                "routing_map",
            ),
        ),
        Around(f"{moe.DISPATCHER}.dispatch_postprocess", within(_dispatcher_call)),
        Around(f"{moe.DISPATCHER}.combine_preprocess", within(_call_after_experts)),
        Around(f"{moe.DISPATCHER}.token_combine", within(_dispatcher_call)),
        moe.all_to_all_patch(_all_to_all, order=1),
        Override(f"{moe.UTILS}:sort_chunks_by_idxs", _sort_chunks, order=1),
    ),
)
