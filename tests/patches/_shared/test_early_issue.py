"""The order in which a pair of layers issues its parts, with the order that Megatron writes down as the caller."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed_lite.engine import Context, Report, Session, Settings
from mindspeed_lite.patches._shared import early_issue

PARTS = ("moe_dispatch", "mlp", "moe_combine")


class Node:
    def __init__(self, name: str, issued: list[str]) -> None:
        self.name, self.issued = name, issued

    def forward(self, x: str) -> str:
        self.issued.append(f"F {self.name}")
        return f"{x} {self.name}"

    def backward(self, grad: str) -> str:
        self.issued.append(f"B {self.name}")
        return f"{grad} {self.name}"

    def backward_dw(self) -> None:
        self.issued.append(f"W {self.name}")


def layer(first: str, issued: list[str]) -> SimpleNamespace:
    return SimpleNamespace(**{name: Node(name, issued) for name in (first, *PARTS)})


@pytest.mark.parametrize("first", ["attn", "pre_dispatch_computation"])
def test_messages_leave_before_what_does_not_feed_them(first: str) -> None:
    def megatron(f_layer, b_layer, x, grad, last=False):
        if b_layer is not None:
            grad = b_layer.moe_combine.backward(grad)
        if f_layer is not None:
            x = getattr(f_layer, first).forward(x)
        if b_layer is not None:
            grad = b_layer.mlp.backward(grad)
        if f_layer is not None:
            x = f_layer.moe_dispatch.forward(x)
        if b_layer is not None:
            b_layer.mlp.backward_dw()
            grad = b_layer.moe_dispatch.backward(grad)
        if f_layer is not None:
            x = f_layer.moe_combine.forward(f_layer.mlp.forward(x))
        if b_layer is not None:
            grad = getattr(b_layer, first).backward(grad)
            getattr(b_layer, first).backward_dw()
        return x, grad

    settings = Settings({})
    session = Session(settings, Context(settings, "cpu", {}, {}), Report({}, "cpu")).of("moe_fb_overlap")
    run = early_issue.PATCH.make(megatron, session)
    issued: list[str] = []
    x, grad = run(layer(first, issued), layer(first, issued), "x", "g")
    assert x == f"x {first} moe_dispatch mlp moe_combine" and grad == f"g moe_combine mlp moe_dispatch {first}"
    first_pair = [
        "B moe_combine",
        f"F {first}",
        "F moe_dispatch",
        "B mlp",
        "B moe_dispatch",
        "F mlp",
        "F moe_combine",
        f"B {first}",
    ]
    assert issued == first_pair
    # Weight gradients wait for the next combine, and in the last layer those of experts for its own dispatch: what
    # waits longer would be computed when gradients of another micro-batch are ready.
    issued.clear()
    run(layer(first, issued), layer(first, issued), "x", "g", is_last_layer_in_bwd=True)
    assert issued == [
        "B moe_combine",
        "W mlp",
        f"W {first}",
        f"F {first}",
        "F moe_dispatch",
        "B mlp",
        "B moe_dispatch",
        "W mlp",
        "F mlp",
        "F moe_combine",
        f"B {first}",
    ]
    # Without a forward pass each message has what there is; attention's last ones go with messages of the pipeline.
    issued.clear()
    run(None, layer(first, issued), None, "g")
    assert issued == ["B moe_combine", f"W {first}", "B mlp", "B moe_dispatch", "W mlp", f"B {first}"]
