"""`--moe-wgrad-side-stream`: compute weight gradients of experts on a side stream.

`auto` alternates steps with and without and keeps the faster. Reaches weight gradients of `--moe-grouped-gemm`, also on
Transformer Engine's layers;
`start_grad_sync`, which waits; `DistributedDataParallel.__init__`, where main gradients are made; and
`zero_grad_buffer`, where a step begins. Leaves other layers alone: sequence parallel ones reuse the buffer they read.
Falls back on CPU, with CUDA graphs, the combined expert schedule, and without gradient accumulation fusion.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

from mindspeed_lite.engine import Around, Feature, Function, Option, Relation, Session
from mindspeed_lite.platform.megatron import CONFIG
from mindspeed_lite.platform.side_stream import DeviceStream, SideStream
from mindspeed_lite.tuning.ab_test import StepABTest

from ._shared import linear_layers, moe
from ._shared.conditions import CUDA_GRAPH_ARGS, config_reasons, every
from ._shared.pipeline_passes import QUEUE
from ._shared.wrappers import before

NAME = "moe_wgrad_side_stream"
AUTO, ALWAYS = "auto", "always"
_DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"
CONFLICTING_ARGS = {
    **CUDA_GRAPH_ARGS,
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm runs layers on streams of its own",
    "overlap_dispatch_backward_with_experts_wgrad": "--overlap-dispatch-backward-with-experts-wgrad does the same",
}


class _SideStreamState:
    def __init__(self, session: Session, executor: DeviceStream) -> None:
        self.side = SideStream(executor)
        self._ab_test: StepABTest | None = None
        self._leader: weakref.ref[Any] | None = None
        if session.settings[NAME] == AUTO:

            def clock() -> float:
                executor.synchronize()
                return time.perf_counter()

            self._ab_test = StepABTest(clock, lambda text: session.log_decision(f"{NAME}: {text}"))

    @property
    def on(self) -> bool:
        return self._ab_test is None or self._ab_test.on

    def begin_step(self, chunk: Any) -> None:
        if self._leader is None or self._leader() is None:
            self._leader = weakref.ref(chunk)
        if self._ab_test is not None and self._leader() is chunk:
            self._ab_test.begin_step()


def put(session: Session, config: Any, compute: Callable[[], None]) -> bool:
    """Submit an expert layer's weight gradient; False if it is not served."""
    state = session.find(NAME)
    # One model may fall back while another does not.
    if state is None or not state.on or config_reasons(CONFLICTING_ARGS, config):
        return False
    state.side.submit(compute)
    return True


def _why_not_here(device: str) -> list[str]:
    return [] if device != "cpu" else ["cpu has no streams: its threads all work on one operator after the other"]


def _init(wrapped: Function, session: Session) -> Function:
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        wrapped(self, config, *args, **kwargs)

        reasons = config_reasons(CONFLICTING_ARGS, config)
        first = next(self.parameters(), None)
        if not config.gradient_accumulation_fusion:
            reasons.append("the model's configuration has no gradient_accumulation_fusion")
        if reasons:
            session.fallback(NAME, "; ".join(reasons))
        elif first is not None and session.find(NAME) is None:
            state = session.state(NAME, lambda: _SideStreamState(session, DeviceStream(first.device)))

            session.on_end(state.side.wait_all)
            for layer in linear_layers.te_layers(self):
                if hasattr(layer, "num_gemms") and not hasattr(layer, QUEUE):
                    _move_gradients(session, layer)

    return __init__


def _move_gradients(session: Session, layer: Any) -> None:
    def submit(compute: Callable[[], None]) -> None:
        if not put(session, layer.config, compute):
            compute()

    if linear_layers.multiplies_bias(layer):
        session.fallback(NAME, "experts' biases have their gradients from the weights' products")
    else:
        linear_layers.take_gradients(session, layer, submit)


def _begin_step(session: Session, chunk: Any) -> None:
    _wait(session)
    state = session.find(NAME)
    if state is not None:
        state.begin_step(chunk)


def _wait(session: Session) -> None:
    state = session.find(NAME)
    if state is not None:
        state.side.wait_all()


FEATURE = Feature(
    name=NAME,
    summary="weight gradients of experts on a side stream during the backward pass",
    options=(
        Option(
            "--moe-wgrad-side-stream",
            help="Run expert weight gradients on a side stream. auto: measure step time off/on and keep the faster.",
            default=None,
            choices=(AUTO, ALWAYS),
            on=AUTO,
            metavar=f"{{{AUTO},{ALWAYS}}}",
        ),
    ),
    numerics="bitwise",
    theme="experts",
    memory="not predicted: inputs of at most two products stay until the side stream has read them",
    condition=every(lambda context: _why_not_here(context.device), moe.has_experts, moe.grouped_experts),
    conflicting_args=CONFLICTING_ARGS,
    not_auto="what it gains has not been measured on any device: enable it explicitly with its flag",
    requires=(
        moe.GROUPED,
        Relation("gradient_accumulation_fusion", "what is added to main gradients is not read before reduction"),
    ),
    patches=(
        Around(f"{_DDP}.__init__", _init, reads=(f"{CONFIG}.gradient_accumulation_fusion",)),
        Around(f"{_DDP}.zero_grad_buffer", before(_begin_step)),
        moe.before_gradients_are_reduced(_wait),
    ),
)
