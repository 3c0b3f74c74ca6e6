"""`--moe-wgrad-side-stream`: weight gradients of experts on a stream beside the vector work of the backward pass.

The products of the weight gradients are what nobody waits for in the backward pass of an expert layer. They go to a
stream of their own, where they run beside the backward passes of activation, permutation, router and norms and beside
the dispatcher's messages; autograd runs what stays on the stream it always had. `auto` takes turns, a step with and a
step without, and keeps what is faster.

Reaches the weight gradients that `--moe-grouped-gemm` adds to main gradients (`--gradient-accumulation-fusion`);
`_ParamAndGradBucketGroup.start_grad_sync`, which is the first to read a main gradient and waits for them;
`DistributedDataParallel.__init__`, where a model gets its main gradients; and `zero_grad_buffer`, where a step begins.
Leaves other layers' gradients alone: those of sequence parallel layers read a buffer that the next layer writes. Steps
aside, with a reason, on CPU, which has one order of execution, for CUDA graphs, for the schedule that overlaps expert
communication, which has streams of its own, and where gradients are not added in the product.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mindspeed_lite.engine import Context, Feature, Option, Relation, Session, Wrap
from mindspeed_lite.pipeline.side import Lane, Side, StreamLane
from mindspeed_lite.pipeline.turns import Turns

from ._found_out import tell
from ._recompute import CUDA_GRAPHS, at_odds

NAME = "moe_wgrad_side_stream"
AUTO, ALWAYS = "auto", "always"
_DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"
_AT_ODDS = {
    **CUDA_GRAPHS,
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm runs layers on streams of its own",
}


class _Beside:
    """The side stream of a session, which all chunks of its model share."""

    def __init__(self, session: Session, lane: Lane) -> None:
        self.side = Side(lane)
        self._turns: Turns | None = None
        self._leader: weakref.ref[Any] | None = None
        if session.settings[NAME] == AUTO:

            def clock() -> float:
                lane.settle()
                return time.perf_counter()

            self._turns = Turns(clock, functools.partial(_say, weakref.ref(session)))

    @property
    def on(self) -> bool:
        return self._turns is None or self._turns.on

    def begin_step(self, chunk: Any) -> None:
        """Called for each chunk of the model; the first one says when a step begins."""
        if self._leader is None or self._leader() is None:
            self._leader = weakref.ref(chunk)
        if self._turns is not None and self._leader() is chunk:
            self._turns.begin_step()


_of_session: weakref.WeakKeyDictionary[Session, _Beside] = weakref.WeakKeyDictionary()


def _say(owner: weakref.ref[Session], text: str) -> None:
    session = owner()
    if session is not None:
        tell(session, f"{NAME}: {text}")


def put(session: Session, config: Any, compute: Callable[[], None]) -> bool:
    """Let a weight gradient of a layer of `config` be computed beside what comes next; False if it is not to be."""
    beside = _of_session.get(session)
    # A model that steps aside may stand beside one that does not.
    if beside is None or not beside.on or _at_odds(config):
        return False
    beside.side.put(compute)
    return True


def _at_odds(config: Any) -> list[str]:
    return at_odds(_AT_ODDS, lambda name: getattr(config, name, None))


def _end(owner: weakref.ref[Session]) -> None:
    """A backward pass that is still to come finds no side stream: nobody would wait for it."""
    session = owner()
    beside = None if session is None else _of_session.pop(session, None)
    if beside is not None:
        beside.side.join()


def _lane_of(device: torch.device) -> Lane:
    return StreamLane(device)


def _why_not_here(device: str) -> list[str]:
    return [] if device != "cpu" else ["cpu has no streams: its threads all work on one operator after the other"]


def _init(wrapped: Callable[..., None], session: Session) -> Callable[..., None]:
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        wrapped(self, config, *args, **kwargs)
        # The condition has seen the arguments of a script; a model may be built without any.
        reasons = _at_odds(config)
        first = next(self.parameters(), None)
        if not config.gradient_accumulation_fusion:
            reasons.append("the model's configuration has no gradient_accumulation_fusion")
        if reasons:
            session.fallback(NAME, "; ".join(reasons))
        elif first is not None and session not in _of_session:
            _of_session[session] = _Beside(session, _lane_of(first.device))
            session.at_end.append(functools.partial(_end, weakref.ref(session)))

    return __init__


def _zero(wrapped: Callable[..., None], session: Session) -> Callable[..., None]:
    def zero_grad_buffer(self: Any) -> None:
        beside = _of_session.get(session)
        if beside is not None:
            beside.side.join()
            beside.begin_step(self)
        wrapped(self)

    return zero_grad_buffer


def _start(wrapped: Callable[..., None], session: Session) -> Callable[..., None]:
    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        beside = _of_session.get(session)
        if beside is not None:
            beside.side.join()
        wrapped(self, *args, **kwargs)

    return start_grad_sync


def _why_not(context: Context) -> Sequence[str]:
    settings = context.settings
    reasons = [*_why_not_here(context.device), *at_odds(_AT_ODDS, lambda name: context.arg(name, None))]
    if settings.get("mindspeed_lite_auto") and settings.get(NAME) is None:
        reasons.append("what it gains has not been measured on any device: ask for it by name")
    return reasons


FEATURE = Feature(
    name=NAME,
    summary="weight gradients of experts on a stream beside the vector work of the backward pass",
    options=(
        Option(
            "--moe-wgrad-side-stream",
            help="Compute weight gradients of experts beside the rest of the backward pass: always, or if it pays.",
            default=None,
            choices=(AUTO, ALWAYS),
            metavar=f"{{{AUTO},{ALWAYS}}}",
        ),
    ),
    numerics="bitwise",
    condition=_why_not,
    requires=(
        Relation("moe_grouped_gemm", "its products are the ones that move"),
        Relation("gradient_accumulation_fusion", "what is added to main gradients nobody reads before reduction"),
    ),
    patches=(
        Wrap(f"{_DDP}.__init__", _init),
        Wrap(f"{_DDP}.zero_grad_buffer", _zero),
        Wrap("megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_grad_sync", _start),
    ),
)
