"""What an exchange of experts can be hidden behind, by hand."""

from __future__ import annotations

import pytest

from benchmarks.expert_order import Layer, between, combined, could_hide, layer_of, plain

LAYER = Layer(attention=1.0, scores=0.0, experts=2.0, first=1.0, second=0.5)


def test_messages_behind_the_shared_expert_and_weight_gradients() -> None:
    assert LAYER.computed == 13.5
    all_hidden = between(LAYER._replace(message=0.5), 2, 3)
    assert (all_hidden.now, all_hidden.exposed) == (6 * 13.5, 0.0)
    # In the forward pass the shared expert is too short for both, by 0.5 and 1.
    some = between(LAYER._replace(message=1.5), 2, 3)
    assert (some.now, some.exposed) == (6 * 15.0, 6 * 1.5)
    off = plain(LAYER._replace(message=1.5), 2, 3)
    assert (off.now, off.exposed) == (6 * 19.5, 6 * 6.0)
    assert could_hide(between, LAYER, 2, 3) == 6 * 6.5


def test_the_first_and_the_last_pass_of_the_combined_schedule() -> None:
    layer = Layer(attention=1.0, scores=0.0, experts=2.0, message=1.0)
    found = combined(layer, 1, 2)
    # Both messages of the first forward pass, and the first one of the last backward pass.
    assert (found.now, found.exposed) == (2 * 9 + 3.0, 3.0)
    assert plain(layer, 1, 2).exposed == 8.0 and could_hide(combined, layer, 1, 2) == 9.0
    # Of two layers the second's has the first's weight gradients beside it.
    assert combined(layer, 2, 2).exposed == 5.0


def test_computation_is_divided_by_the_size_of_products() -> None:
    counted = layer_of(tokens=256, hidden=512, width=1024, topk=2, shared=1024)
    assert counted.experts == 2 * (counted.first + counted.second) == 6 * 256 * 512 * 1024
    scaled = counted.scaled(9.0)
    assert scaled.computed == pytest.approx(9.0) and scaled.message == 0.0
    assert scaled.experts / scaled.attention == counted.experts / counted.attention
