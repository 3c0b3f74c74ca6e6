"""Who shares a sequence, and what each layer keeps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mindspeed_lite.engine import Context, Report, Session, Settings
from mindspeed_lite.patches._shared import context_parallel
from mindspeed_lite.patches._shared.context_parallel import algorithm_named
from mindspeed_lite.patches.context_parallel_algo import FEATURE


def session_of(**settings):
    values = Settings.of(FEATURE.options, settings)
    return Session(values, Context(values, "cpu", {}), Report({}, "cpu"))


@pytest.mark.parametrize(
    ("policy", "interval", "caches"),
    [("full", 0, ["full"] * 3), ("full", 2, ["full", "none", "none", "full"]), (None, 0, ["none"])],
)
def test_layers_keep_keys_at_an_interval(policy, interval, caches):
    session = session_of(context_parallel_kv_cache_policy=policy, context_parallel_cache_interval=interval)
    layers = range(1, len(caches) + 1)
    assert [context_parallel.ring_of(None, layer, session).cache for layer in layers] == caches


def test_the_least_exposed_is_chosen_and_logged_once(monkeypatch):
    session, logged = session_of(), []
    monkeypatch.setattr(session, "log_decision", logged.append)
    group = SimpleNamespace(size=lambda: 4)

    def chosen(rows, heads, groups):
        q, k = torch.empty(rows, 1, heads, 8, device="meta"), torch.empty(rows, 1, groups, 8, device="meta")
        return context_parallel.least_exposed(q, k, k, group, True, session)

    assert chosen(64, 8, 8) == chosen(64, 8, 8) == "ulysses"
    assert chosen(8, 32, 1) == "ring", "32 query heads' products hide the hops of one key head"
    assert chosen(1 << 16, 8, 8) == "ring", "products of long sequences hide what travels"
    assert chosen(1 << 10, 2, 2) == "ring", "fewer heads than ranks"
    assert len(logged) == 4 and "ulysses for 64 rows on each of 4 ranks" in logged[0]


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
