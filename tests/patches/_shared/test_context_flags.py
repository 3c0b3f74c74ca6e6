"""What flags and configuration name for each layer; contradictions are tested with the feature."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed_lite.engine import Context, Settings
from mindspeed_lite.patches._shared.context_flags import algorithm_named
from mindspeed_lite.patches.context_parallel_algo import FEATURE


def context(explicit, host, **settings):
    return Context(Settings.of(FEATURE.options, settings), "cpu", {}, host, frozenset(explicit))


@pytest.mark.parametrize(
    ("types", "settings", "host", "names"),
    [
        (None, {}, None, [None, None]),
        # The default of Megatron's parser, and what is asked of its configuration alone.
        ("p2p", {}, {}, [None, None]),
        ("p2p", {}, None, ["ring", "ring"]),
        ("p2p", {}, {"cp_comm_type": ["p2p"]}, ["ring", "ring"]),
        (["p2p", "a2a"], {}, {"cp_comm_type": ["p2p", "a2a"]}, ["ring", "ulysses"]),
        # What is about a ring leaves the types of layers alone.
        (["p2p", "a2a"], {"cp_window_size": 2}, {"cp_comm_type": ["p2p", "a2a"]}, ["ring", "ulysses"]),
        ("p2p", {"use_ulysses_allgather_kv": True}, {}, ["ulysses", "ulysses"]),
        (None, {"ulysses_degree_in_cp": 2}, None, ["hybrid", "hybrid"]),
        ("p2p", {"context_parallel_algo": "kvallgather_cp_algo"}, {}, ["gathered", "gathered"]),
    ],
)
def test_the_algorithm_of_each_layer_is_what_flags_or_configuration_name(types, settings, host, names):
    its = context({"cp_comm_type"} & (host or {}).keys(), host, **settings)
    layers = [SimpleNamespace(config=SimpleNamespace(cp_comm_type=types), layer_number=number) for number in (1, 2)]
    assert [algorithm_named(layer, its) for layer in layers] == names
