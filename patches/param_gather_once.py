"""`--param-gather-once`: gather each parameter of a model with experts once a step.

Megatron's optimizers of dense parameters and experts each gather the whole model. Reaches
`_ParamAndGradBucketGroup.start_param_sync` during `DistributedOptimizer.step_with_ready_grads`, to gather only updated
buckets. Leaves `--overlap-param-gather` alone, which gathers once already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from mindspeed_lite.engine import Around, Feature, Function, Override, Session

from ._shared.conditions import every, fsdp_args, needs
from ._shared.wrappers import within

# Parameters of the optimizers being stepped, innermost last.
_stepping: list[Any] = []


@contextlib.contextmanager
def _stepping_optimizer(session: Session, optimizer: Any) -> Iterator[None]:
    # An optimizer without parameters has no map.
    updated = getattr(optimizer, "model_param_gbuf_map", None)
    if updated is None:
        yield
        return
    _stepping.append(updated)
    try:
        yield
    finally:
        _stepping.pop()


def _gather(wrapped: Function, session: Session) -> Function:
    def start_param_sync(self: Any, force_sync: bool = False) -> Any:
        if _stepping and not any(param in _stepping[-1] for bucket in self.buckets for param in bucket.params):
            return None
        return wrapped(self, force_sync)

    return start_param_sync


FEATURE = Feature(
    name="param_gather_once",
    summary="parameters gathered once a step where dense ones and experts have an optimizer each",
    numerics="bitwise",
    theme="communication",
    memory="none: it moves fewer bytes and keeps the same ones",
    condition=every(
        needs("use_distributed_optimizer", "no parameters are gathered"),
        needs("num_experts", "there is one optimizer, which gathers once"),
    ),
    conflicting_args={
        "overlap_param_gather": "--overlap-param-gather gathers once already",
        **fsdp_args("gathers by itself"),
    },
    patches=(
        Around(
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.step_with_ready_grads",
            within(_stepping_optimizer),
        ),
        Override(
            "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_param_sync",
            _gather,
            reads=("_ParamAndGradBucket.params",),
        ),
    ),
)
