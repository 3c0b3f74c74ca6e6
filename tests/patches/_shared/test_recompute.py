"""Which layers release an output, and the reasons that both features share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed_lite.engine import Settings
from mindspeed_lite.patches import recompute_activation_function, recompute_norm
from mindspeed_lite.patches._shared import recompute


def chosen(number, layers=4, chunks=1, **fields):
    values = {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None, **fields}
    config = SimpleNamespace(virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None, **values)
    return [
        (chunk, place)
        for place in range(layers)
        for chunk in range(chunks)
        if recompute.is_among(recompute.recompute_index(config, place, chunk if chunks > 1 else None), number)
    ]


def test_layers_are_taken_from_all_chunks_in_turn():
    assert len(chosen(None)) == 4 and chosen(2) == [(0, 0), (0, 1)]
    assert chosen(3, chunks=2) == [(0, 0), (1, 0), (0, 1)]
    assert len(chosen(None, chunks=3)) == 12


def test_layers_that_are_computed_again_as_a_whole_are_passed_over():
    block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    assert chosen(None, **block) == [(0, 1), (0, 2), (0, 3)]
    assert chosen(2, chunks=2, **block) == [(0, 1), (1, 1)]
    assert chosen(None, **{**block, "recompute_method": "uniform"}) == []
    assert len(chosen(None, recompute_granularity="selective")) == 4


@pytest.mark.parametrize("patch", [recompute_activation_function, recompute_norm])
def test_a_number_of_layers_turns_it_on(patch):
    def enabled(**given):
        return patch.FEATURE.is_enabled(Settings.of(patch.FEATURE.options, given))

    assert (
        not enabled() and enabled(**{patch.FEATURE.name: True}) and enabled(**{f"{patch.FEATURE.name}_num_layers": 2})
    )


class Layer:
    """What a feature prepares."""


def test_a_model_built_without_arguments_is_asked_itself():
    said, prepared = [], []
    settings = Settings({"recompute_norm_num_layers": None})
    session = SimpleNamespace(settings=settings, on_begin=lambda begin: None, fallback=lambda *text: said.append(text))
    feature = recompute.feature_of_layers(
        "recompute_norm", summary="", numerics="ulp", theme="memory", reads=(), patches=(),
        prepare=lambda layer, session: prepared.append(layer),
    )  # fmt: skip
    build = feature.patches[0].make(lambda layer, config: setattr(layer, "config", config), session)
    fields = {"recompute_granularity": None, "virtual_pipeline_model_parallel_size": None}
    build(Layer(), SimpleNamespace(**fields, cuda_graph_impl="none"))
    assert len(prepared) == 1 and not said
    build(Layer(), SimpleNamespace(**fields, fp8="e4m3", cuda_graph_impl="local"))
    assert len(prepared) == 1 and len(said) == 1 and "fp8" in said[0][1] and "--cuda-graph-impl" in said[0][1]
