"""`--reset-bucket-group-order`: all-gather parameters in first-forward order.

With `--overlap-param-gather` Megatron links buckets in registration order and starts the first gather when it is
needed. Reaches `DistributedDataParallel.__init__`, which links the chains; `finish_param_sync`, where the first step
shows the order of use; and `DistributedOptimizer.step_with_ready_grads`, after which the first gather starts early.
Leaves the gathers themselves alone. Falls back for `--align-param-gather` and
`--overlap-param-gather-with-optimizer-step`, which start gathers themselves.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any

from mindspeed_lite.engine import Around, Context, Feature, Option, Session
from mindspeed_lite.platform.megatron import DDP_CONFIG

from ._shared.conflicts import conflict_reasons, fsdp_reasons

NAME = "reset_bucket_group_order"
_GROUP = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
_ORDER = "order_of_first_use"
_NEXT = "next_param_gather_bucket_group"


class Order:
    """The bucket groups of one chain, linked again once it is known in which order they are used."""

    def __init__(self, groups: Sequence[Any], session: Session) -> None:
        # Megatron links them from the last to the first.
        self._registered = list(reversed(groups))
        self._used: list[Any] = []
        self._session = session
        self.known = False
        for group in groups:
            session.mark(group, _ORDER, self)
            # Until the order is known each is fetched when it is needed.
            session.mark(group, _NEXT, None)

    def begin(self) -> None:
        """Start the first gather of the next forward pass, if it is known which that is."""
        if self.known and not self._used[0].param_gather_dispatched:
            self._used[0].start_param_sync()

    def is_of(self, parameters: Container[Any]) -> bool:
        """Whether the chain is of these parameters."""
        return any(parameter in parameters for group in self._registered for parameter in group.params)

    def wait_for(self, group: Any) -> None:
        """`group` is about to be waited for."""
        if group not in self._used:
            self._used.append(group)
            if len(self._used) == len(self._registered):
                self._link()
        elif not group.param_gather_dispatched:
            # The next step has begun, and some groups have not been used at all.
            self._link()

    def _link(self) -> None:
        for one, other in itertools.pairwise(self._used):
            self._session.mark(one, _NEXT, other)
        # What is not used stays out: nothing would wait for it, and Megatron starts no gather twice.
        for group in self._registered:
            delattr(group, _ORDER)
        self.known = True
        registered = [each for each in self._registered if each in self._used]
        moved = sum(one is not other for one, other in zip(self._used, registered, strict=True))
        self._session.log_decision(
            f"{NAME}: {moved} of {len(self._used)} bucket groups are used in another place than registered"
            if moved
            else f"{NAME}: all {len(self._used)} bucket groups are used in the order in which they were registered"
        )


def _init(wrapped: Callable[..., None], session: Session) -> Callable[..., None]:
    def __init__(self: Any, config: Any, ddp_config: Any, *args: Any, **kwargs: Any) -> None:
        wrapped(self, config, ddp_config, *args, **kwargs)
        reasons = conflict_reasons(
            CONFLICTING_ARGS, lambda name: getattr(self.ddp_config, name, getattr(self, name, False))
        )
        if not self.ddp_config.overlap_param_gather:
            return
        if reasons:
            session.fallback(NAME, "; ".join(reasons))
            return
        chains = [each for each in (self.bucket_groups, self.expert_parallel_bucket_groups) if each]
        if all(len(each) == 1 for each in chains):
            session.log_decision(
                f"{NAME}: one bucket holds all parameters: no order, an early start (--ddp-bucket-size)"
            )
        chains_of: Any = session.state(NAME, weakref.WeakKeyDictionary)
        chains_of[self] = [Order(groups, session) for groups in chains]

    return __init__


def _finish(wrapped: Callable[..., None], session: Session) -> Callable[..., None]:
    def finish_param_sync(self: Any, skip_next_bucket_dispatch: bool = False) -> None:
        order = getattr(self, _ORDER, None)
        if order is not None:
            order.wait_for(self)
        wrapped(self, skip_next_bucket_dispatch)

    return finish_param_sync


def _step(wrapped: Callable[..., bool], session: Session) -> Callable[..., bool]:
    def step_with_ready_grads(self: Any) -> bool:
        done = wrapped(self)
        for model in getattr(self, "model_chunks", ()):
            for order in (session.find(NAME) or {}).get(model, ()):
                # Dense parameters and experts have an optimizer each.
                if order.is_of(self.model_param_gbuf_map):
                    order.begin()
        return done

    return step_with_ready_grads


CONFLICTING_ARGS = {
    "align_param_gather": "--align-param-gather starts gathers from the pipeline's schedule",
    "overlap_param_gather_with_optimizer_step": "--overlap-param-gather-with-optimizer-step starts them in the step",
}


def _why_not(context: Context) -> Sequence[str]:
    reasons: list[str] = []
    if context.host_args is None:
        return reasons
    if not context.arg("overlap_param_gather", False):
        reasons.append("--overlap-param-gather is not given: no gather overlaps anything")
    return reasons + fsdp_reasons(context, "gathers by itself")


FEATURE = Feature(
    name=NAME,
    summary="parameters gathered in the order of the first forward pass, from the end of the step on",
    options=(
        Option(
            "--reset-bucket-group-order",
            help="Start overlapped parameter all-gathers at the end of the step, in first-forward order.",
        ),
    ),
    numerics="bitwise",
    theme="communication",
    memory="none: gathers start in another order",
    condition=_why_not,
    conflicting_args=CONFLICTING_ARGS,
    patches=(
        Around(
            "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
            _init,
            reads=(
                "bucket_groups",
                "ddp_config",
                "expert_parallel_bucket_groups",
                f"{DDP_CONFIG}.overlap_param_gather",
                f"{_GROUP}.{_NEXT}",
            ),
        ),
        Around(f"{_GROUP}.finish_param_sync", _finish, reads=(_NEXT, "param_gather_dispatched")),
        Around(
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.step_with_ready_grads",
            _step,
            reads=(
                "model_param_gbuf_map",
                *(f"{_GROUP}.{name}" for name in ("param_gather_dispatched", "params", "start_param_sync")),
            ),
        ),
    ),
)
