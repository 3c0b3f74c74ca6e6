"""Marks the messages of Megatron's token dispatchers in a timeline, forward and backward.

Wraps `dispatch_preprocess`, `token_dispatch` and `token_combine` of each dispatcher; values do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._pytree import tree_leaves

from lab.timeline import COMBINE, DISPATCH, Timeline
from mindspeed_lite.engine import Around, Session
from mindspeed_lite.platform import megatron

_MODULE = "megatron.core.transformer.moe.token_dispatcher"
_CLASSES = ("MoEAlltoAllTokenDispatcher", "MoEAllGatherTokenDispatcher", "MoEFlexTokenDispatcher")
_METHODS = {"dispatch_preprocess": DISPATCH, "token_dispatch": DISPATCH, "token_combine": COMBINE}


def install(timeline: Timeline) -> Callable[[], None]:
    """Mark expert messages once the dispatchers are imported; returns an undo callable."""

    def marking(lane: str) -> Callable[[Callable[..., Any], Session], Callable[..., Any]]:
        def begin_backward(_: Any) -> None:
            timeline.expert_backward(lane)

        def make(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
            def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                groups = [getattr(self, name, None) for name in ("ep_group", "tp_ep_group")]
                with timeline.expert_call(lane, [each for each in groups if each is not None]):
                    found = wrapped(self, *args, **kwargs)
                nodes: set[Any] = {getattr(each, "grad_fn", None) for each in tree_leaves(found)}
                for node in nodes - {None}:
                    node.register_prehook(begin_backward)
                return found

            return call

        return make

    feature = megatron.always(
        "experts_messages",
        "timeline marks of expert messages",
        *(
            Around(f"{_MODULE}:{name}.{method}", marking(lane))
            for name in _CLASSES
            for method, lane in _METHODS.items()
        ),
    )
    return megatron.Placed(feature).remove


__all__ = ["install"]
