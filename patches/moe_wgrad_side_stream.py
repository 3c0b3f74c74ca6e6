"""`--moe-wgrad-side-stream`: weight gradients of experts on a stream beside the vector work of the backward pass.

In the backward pass of an expert layer nothing waits for the GEMMs of the weight gradients. They go to a
stream of their own, where they run beside the backward passes of activation, permutation, router and norms and beside
the dispatcher's messages; autograd runs what stays on the stream it always had. `auto` takes turns, a step with and a
step without, and keeps what is faster.

Reaches the weight gradients that `--moe-grouped-gemm` adds to main gradients (`--gradient-accumulation-fusion`);
`_ParamAndGradBucketGroup.start_grad_sync`, which is the first to read a main gradient and waits for them;
`DistributedDataParallel.__init__`, where a model gets its main gradients; and `zero_grad_buffer`, where a step begins.
Leaves other layers' gradients alone: those of sequence parallel layers read a buffer that the next layer writes. Falls
back, with a reason, on CPU, which has one order of computation, for CUDA graphs, for the schedule that overlaps expert
communication, which has streams of its own, and where gradients are not added in the product.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mindspeed_lite.engine import Around, Context, Feature, Option, Relation, Session
from mindspeed_lite.platform.megatron import CONFIG
from mindspeed_lite.platform.side_stream import DeviceStream, SideStream
from mindspeed_lite.tuning.ab_test import StepABTest

from ._shared import moe
from ._shared.conflicts import CUDA_GRAPH_ARGS, conflict_reasons

NAME = "moe_wgrad_side_stream"
AUTO, ALWAYS = "auto", "always"
_DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"
CONFLICTING_ARGS = {
    **CUDA_GRAPH_ARGS,
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm runs layers on streams of its own",
}


class _SideStreamState:
    """The side stream of a session, which all chunks of its model share."""

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
        """Called for each chunk of the model; the first one says when a step begins."""
        if self._leader is None or self._leader() is None:
            self._leader = weakref.ref(chunk)
        if self._ab_test is not None and self._leader() is chunk:
            self._ab_test.begin_step()


def put(session: Session, config: Any, compute: Callable[[], None]) -> bool:
    """Let a weight gradient of a layer of `config` be computed beside what comes next; False if it is not to be."""
    beside = session.find(NAME)
    # A model that falls back may stand beside one that does not.
    if beside is None or not beside.on or _conflict_reasons(config):
        return False
    beside.side.submit(compute)
    return True


def _conflict_reasons(config: Any) -> list[str]:
    return conflict_reasons(CONFLICTING_ARGS, lambda name: getattr(config, name, None))


def _executor_of(device: torch.device) -> DeviceStream:
    return DeviceStream(device)


def _why_not_here(device: str) -> list[str]:
    return [] if device != "cpu" else ["cpu has no streams: its threads all work on one operator after the other"]


def _init(wrapped: Callable[..., None], session: Session) -> Callable[..., None]:
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        wrapped(self, config, *args, **kwargs)
        # The condition has seen the arguments of a script; a model may be built without any.
        reasons = _conflict_reasons(config)
        first = next(self.parameters(), None)
        if not config.gradient_accumulation_fusion:
            reasons.append("the model's configuration has no gradient_accumulation_fusion")
        if reasons:
            session.fallback(NAME, "; ".join(reasons))
        elif first is not None and session.find(NAME) is None:
            beside = session.state(NAME, lambda: _SideStreamState(session, _executor_of(first.device)))
            # A backward pass that is still to come finds no side stream: nothing would wait for it.
            session.on_end(beside.side.wait_all)

    return __init__


def _zero(wrapped: Callable[..., None], session: Session) -> Callable[..., None]:
    def zero_grad_buffer(self: Any) -> None:
        beside = session.find(NAME)
        if beside is not None:
            beside.side.wait_all()
            beside.begin_step(self)
        wrapped(self)

    return zero_grad_buffer


def _wait(session: Session) -> None:
    beside = session.find(NAME)
    if beside is not None:
        beside.side.wait_all()


def _why_not(context: Context) -> Sequence[str]:
    return _why_not_here(context.device)


FEATURE = Feature(
    name=NAME,
    summary="weight gradients of experts on a stream beside the vector work of the backward pass",
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
    condition=_why_not,
    conflicting_args=CONFLICTING_ARGS,
    not_auto="what it gains has not been measured on any device: enable it explicitly with its flag",
    requires=(
        Relation("moe_grouped_gemm", "its products are the ones that move"),
        Relation("gradient_accumulation_fusion", "what is added to main gradients is not read before reduction"),
    ),
    patches=(
        Around(f"{_DDP}.__init__", _init, reads=(f"{CONFIG}.gradient_accumulation_fusion",)),
        Around(f"{_DDP}.zero_grad_buffer", _zero),
        moe.before_gradients_are_reduced(_wait),
    ),
)
