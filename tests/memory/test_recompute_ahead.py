"""Recomputation before the backward pass: what is run when, with which random numbers, and the bits of gradients."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from mindspeed_lite.memory.recompute_ahead import RecomputedUnits


def snapshot():
    state = torch.get_rng_state()

    @contextlib.contextmanager
    def restored():
        with torch.random.fork_rng():
            torch.set_rng_state(state)
            yield

    return restored


def reentrant(function, *inputs):
    return torch_checkpoint(function, *inputs, use_reentrant=True)


class Layer(torch.nn.Module):
    """A layer with dropout, of which a checkpoint takes a tensor, None and a tensor without gradient."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)
        self.calls = []

    def forward(self, x, context, scale):
        self.calls.append(torch.is_grad_enabled())
        return torch.nn.functional.dropout(self.linear(x).tanh() * scale, 0.5) + x, context


def model(seed=0):
    torch.manual_seed(seed)
    return [Layer() for _ in range(3)]


def forward_of(layers, units=None):
    """The forward pass of a chunk, whose layers are checkpointed by `units`, or by torch alone."""

    def forward(microbatch, x):
        scale = torch.full((1,), 2.0)
        for layer in layers:
            inputs = (x, None, scale)
            x, none = units.checkpoint(reentrant, layer, (), inputs) if units else reentrant(layer, *inputs)
            assert none is None
        return x

    return forward


def trained(layers, forward, between=None):
    """All gradients of two micro-batches, `between` called before each backward; forwards come first."""
    torch.manual_seed(7)
    inputs = [torch.randn(4, 6, requires_grad=True) for _ in range(2)]
    outputs = [forward(microbatch, each) for microbatch, each in enumerate(inputs)]
    for microbatch, output in enumerate(outputs):
        if between is not None:
            between(microbatch)
        torch.manual_seed(100 + microbatch)
        output.square().sum().backward()
    return [each.grad for each in inputs] + [weight.grad for layer in layers for weight in layer.parameters()]


def ahead(marked, stores_others=False):
    layers, units = model(), RecomputedUnits(snapshot, stores_others)
    units.begin(frozenset(marked))

    def between(microbatch):
        if (0, microbatch) in marked:
            units.recompute(0, microbatch)

    return layers, trained(layers, units.recording(forward_of(layers, units), 0), between)


@pytest.mark.parametrize("marked", [{(0, 0), (0, 1)}, {(0, 1)}, set()])
def test_gradients_have_the_bits_of_recomputation_in_the_backward_pass(marked):
    expected = trained(layers := model(), forward_of(layers))
    layers, found = ahead(marked)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b) and a.abs().sum() > 0
    # Once without and once with a graph for each micro-batch, wherever the second is.
    assert sorted(layers[0].calls) == [False, False, True, True]


def test_what_is_not_marked_may_be_stored_and_has_the_same_bits():
    layers, found = ahead({(0, 1)}, stores_others=True)
    assert sorted(layers[0].calls) == [False, True, True]
    expected = trained(layers := model(), forward_of(layers))
    assert all(map(torch.equal, expected, found))


def test_the_second_run_is_the_recomputation_and_the_backward_runs_none():
    layers, units = model(), RecomputedUnits(snapshot, False)
    units.begin(frozenset({(1, 0)}))
    output = units.recording(forward_of(layers, units), 1)(0, torch.randn(4, 6, requires_grad=True))
    assert [len(layer.calls) for layer in layers] == [1, 1, 1]
    units.recompute(1, 0)
    assert [len(layer.calls) for layer in layers] == [2, 2, 2]
    output.sum().backward()
    assert [len(layer.calls) for layer in layers] == [2, 2, 2]


def test_weights_are_trained_where_no_input_is():
    layers, units = model(), RecomputedUnits(snapshot, False)
    units.begin(frozenset({(0, 0)}))
    x, w = torch.randn(4, 6), torch.zeros(1, requires_grad=True)

    def forward(microbatch, received):
        # Torch's checkpoint wants one input with a gradient: here it changes nothing.
        return units.checkpoint(reentrant, lambda a, b: layers[0](a, None, torch.ones(1))[0], (), (x, w))

    output = units.recording(forward, 0)(0, None)
    units.recompute(0, 0)
    output.sum().backward()
    assert layers[0].linear.weight.grad.abs().sum() > 0 and w.grad is None


def test_outside_a_pass_and_within_a_checkpoint_the_host_decides():
    units, calls = RecomputedUnits(snapshot, True), []

    def checkpoint(function, *inputs):
        calls.append(function)
        return function(*inputs)

    assert units.checkpoint(checkpoint, abs, (), (-3,)) == 3 and calls == [abs]
    units.begin(frozenset({(0, 0)}))

    def nested(x):
        return units.checkpoint(checkpoint, abs, (), (x,))

    units.recording(lambda microbatch, x: units.checkpoint(checkpoint, nested, (), (x,)), 0)(0, -3)
    # The outer one is recorded, the inner one is the host's own.
    assert len(calls) == 3 and calls[2] is abs and calls[1] is not nested


def test_a_step_begins_without_what_an_earlier_one_has_left():
    units = RecomputedUnits(snapshot, False)
    units.begin(frozenset({(0, 0)}))
    units.recording(lambda microbatch, x: units.checkpoint(reentrant, torch.sin, (), (x,)), 0)(
        0, torch.ones(1, requires_grad=True)
    )
    units.begin(frozenset())
    with pytest.raises(KeyError):
        units.recompute(0, 0)


def test_a_weight_behind_an_input_without_gradient_is_trained():
    """As off, which recomputes nothing: the first layer of a model whose embedding is frozen."""
    layer, units = Layer(), RecomputedUnits(snapshot, True)
    units.begin(frozenset({(0, 0)}))
    inputs = (torch.ones(2, 6), None, torch.full((1,), 2.0))
    forward = units.recording(lambda microbatch, x: units.checkpoint(reentrant, layer, (), inputs)[0], 0)
    out = forward(0, None)
    units.recompute(0, 0)
    out.sum().backward()
    assert layer.linear.weight.grad is not None and layer.calls == [True]
