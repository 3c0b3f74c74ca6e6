"""`--reset-bucket-group-order`: all-gather parameters in first-forward order.

For `--overlap-param-gather`, which gathers in registration order. Reaches `DistributedDataParallel.__init__`, which
links the chains; `finish_param_sync`, where the first step shows the order of use; and
`DistributedOptimizer.step_with_ready_grads`, after which the first gather starts. Leaves the gathers alone. Falls back
for `--align-param-gather` and `--overlap-param-gather-with-optimizer-step`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Container, Sequence
from typing import Any

from mindspeed_lite.engine import Around, Feature, Session
from mindspeed_lite.engine.feature import conflict_reasons
from mindspeed_lite.platform.megatron import DDP_CONFIG

from ._shared.conditions import fsdp_args, needs
from ._shared.wrappers import after, after_init, before

NAME = "reset_bucket_group_order"
_GROUP = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
_ORDER = "order_of_first_use"
_NEXT = "next_param_gather_bucket_group"


class Order:
    """Bucket groups of one chain, linked in order of use once known."""

    def __init__(self, groups: Sequence[Any], session: Session) -> None:
        # Megatron links them from last to first.
        self._registered = list(reversed(groups))
        self._used: list[Any] = []
        self._session = session
        self.known = False
        for group in groups:
            session.mark(group, _ORDER, self)
            # Until the order is known, each is gathered on demand.
            session.mark(group, _NEXT, None)

    def begin(self) -> None:
        """Start the first gather of the next forward pass, if the order is known."""
        if self.known and not self._used[0].param_gather_dispatched:
            self._used[0].start_param_sync()

    def is_of(self, parameters: Container[Any]) -> bool:
        return any(parameter in parameters for group in self._registered for parameter in group.params)

    def wait_for(self, group: Any) -> None:
        if group not in self._used:
            self._used.append(group)
            if len(self._used) == len(self._registered):
                self._link()
        elif not group.param_gather_dispatched:
            self._link()

    def _link(self) -> None:
        for one, other in itertools.pairwise(self._used):
            self._session.mark(one, _NEXT, other)
        # Nothing would wait for the gather of unused groups.
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


def _link_chains(session: Session, ddp: Any) -> bool:
    if not ddp.ddp_config.overlap_param_gather:
        return False
    reasons = conflict_reasons(CONFLICTING_ARGS, lambda name: getattr(ddp.ddp_config, name, getattr(ddp, name, False)))
    if reasons:
        session.fallback(NAME, "; ".join(reasons))
        return False
    chains = [each for each in (ddp.bucket_groups, ddp.expert_parallel_bucket_groups) if each]
    if all(len(each) == 1 for each in chains):
        session.log_decision(f"{NAME}: one bucket holds all parameters: no order, an early start (--ddp-bucket-size)")
    chains_of: Any = session.state(NAME, weakref.WeakKeyDictionary)
    chains_of[ddp] = [Order(groups, session) for groups in chains]
    return True


def _wait_for(session: Session, group: Any) -> None:
    order = getattr(group, _ORDER, None)
    if order is not None:
        order.wait_for(group)


def _begin_gathers(session: Session, optimizer: Any) -> None:
    for model in getattr(optimizer, "model_chunks", ()):
        for order in (session.find(NAME) or {}).get(model, ()):
            # Dense parameters and experts have separate optimizers.
            if order.is_of(optimizer.model_param_gbuf_map):
                order.begin()


CONFLICTING_ARGS = {
    "align_param_gather": "--align-param-gather starts gathers from the pipeline's schedule",
    "overlap_param_gather_with_optimizer_step": "--overlap-param-gather-with-optimizer-step starts them in the step",
}


FEATURE = Feature(
    name=NAME,
    summary="parameters gathered in the order of the first forward pass, from the end of the step on",
    numerics="bitwise",
    theme="communication",
    memory="none: gathers start in another order",
    condition=needs("overlap_param_gather", "no gather overlaps anything"),
    conflicting_args={**CONFLICTING_ARGS, **fsdp_args("gathers by itself")},
    patches=(
        Around(
            "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
            after_init(_link_chains),
            reads=(
                "bucket_groups",
                "ddp_config",
                "expert_parallel_bucket_groups",
                f"{DDP_CONFIG}.overlap_param_gather",
                f"{_GROUP}.{_NEXT}",
            ),
        ),
        Around(f"{_GROUP}.finish_param_sync", before(_wait_for), reads=(_NEXT, "param_gather_dispatched")),
        Around(
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.step_with_ready_grads",
            after(_begin_gathers),
            reads=(
                "model_param_gbuf_map",
                *(f"{_GROUP}.{name}" for name in ("param_gather_dispatched", "params", "start_param_sync")),
            ),
        ),
    ),
)
