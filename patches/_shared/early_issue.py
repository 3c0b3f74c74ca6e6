"""The order in which Megatron's combined schedule issues what it runs: messages as soon as what they read is there.

Megatron's order leaves it to a device's queue to start a message while what was issued before it still computes. A
process that computes by itself has no such queue, and neither has the weight gradient of attention, which Megatron
issues before the next message. Within one pair of layers, forward (F) of one micro-batch and backward (B) of another:

    Megatron                     here                             beside the message
    B combine                    B combine                        B weight gradients of the layer before,
    F attention                  F attention                      F attention
    B experts                    F dispatch                       B experts
    F dispatch                   B experts
    B experts' weight gradients  B dispatch                       F experts
    B dispatch                   F experts
    F experts                    F combine                        B attention, and the weight gradients
    F combine                    B attention                      behind the next B combine
    B attention

The experts of the other micro-batch are longer than a message, where both pay at all. So weight gradients go where
attention alone is beside messages. In the last layer of a backward pass, and where there is no forward pass, those of
the experts run behind B dispatch. Messages leave in the same order, and each gradient is a sum in the same order: the
same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_lite.engine import Override, Session

from .proxies import AttributeOverride

_STATE = "early issue"
_PLAN = "megatron.core.models.common.model_chunk_schedule_plan:TransformerLayerSchedulePlan"


def _before_dispatch(layer: Any) -> tuple[str, Any]:
    """The part of a layer before its dispatch, which is called otherwise since 0.19."""
    name = "pre_dispatch_computation" if hasattr(layer, "pre_dispatch_computation") else "attn"
    return name, getattr(layer, name)


def _forward(layer: Any) -> Any:
    """A layer of the forward pass whose tokens leave behind its attention."""
    name, first = _before_dispatch(layer)
    dispatch, sent = layer.moe_dispatch, []

    def forward(x: Any) -> Any:
        y = first.forward(x)
        sent.append(dispatch.forward(y))
        return y

    return AttributeOverride(
        layer,
        **{name: AttributeOverride(first, forward=forward)},
        moe_dispatch=AttributeOverride(dispatch, forward=lambda _: sent.pop()),
    )


def _backward(layer: Any, waiting: list[Callable[[], None]], has_next: bool) -> Any:
    """A layer of the backward pass whose weight gradients are computed behind a later message.

    has_next: a pair of layers comes behind this one in the backward pass, whose combine they can be left to.
    """
    name, first = _before_dispatch(layer)

    def behind(node: Any) -> Any:
        def backward(grad: Any) -> Any:
            found = node.backward(grad)
            while waiting:
                waiting.pop(0)()
            return found

        return AttributeOverride(node, backward=backward)

    def put_off(node: Any) -> Any:
        return AttributeOverride(node, backward_dw=lambda: waiting.append(node.backward_dw))

    return AttributeOverride(
        layer,
        moe_combine=behind(layer.moe_combine),
        moe_dispatch=layer.moe_dispatch if has_next else behind(layer.moe_dispatch),
        mlp=put_off(layer.mlp),
        **{name: put_off(first)},
    )


def _run(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def run(
        f_layer: Any, b_layer: Any, f_input: Any = None, b_grad: Any = None, is_last_layer_in_bwd: bool = False
    ) -> Any:
        # What the last layer of a backward pass computes goes with messages of the pipeline.
        waiting: list[Callable[[], None]] = session.state(_STATE, list)
        forward = None if f_layer is None else _forward(f_layer)
        has_next = f_layer is not None and not is_last_layer_in_bwd
        backward = None if b_layer is None else _backward(b_layer, waiting, has_next)
        return wrapped(forward, backward, f_input, b_grad, is_last_layer_in_bwd)

    return run


# Megatron's own body runs; what it calls, and in which order, is what this was written for.
PATCH = Override(f"{_PLAN}.run", _run)
