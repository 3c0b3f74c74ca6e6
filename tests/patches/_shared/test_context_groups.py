"""Who shares a sequence, and what each layer keeps."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from mindspeed_lite.engine import Context, Report, Session, Settings
from mindspeed_lite.patches._shared import context_groups
from mindspeed_lite.patches.context_parallel_algo import FEATURE


def session_of(**settings):
    values = Settings.of(FEATURE.options, settings)
    return Session(values, Context(values, "cpu", {}), Report({}, "cpu"))


def test_layers_keep_keys_at_an_interval():
    policy = {"context_parallel_kv_cache_policy": "full"}
    every = context_groups.Options.of(session_of(**policy))
    assert [every.cache_of(layer) for layer in (1, 2, 3)] == ["full"] * 3
    third = context_groups.Options.of(session_of(**policy, context_parallel_cache_interval=2))
    assert [third.cache_of(layer) for layer in range(1, 8)] == ["full", "none", "none"] * 2 + ["full"]
    assert context_groups.Options.of(session_of()).cache_of(1) == "none"


def test_the_least_exposed_is_chosen_and_logged_once(monkeypatch):
    session, logged = session_of(), []
    monkeypatch.setattr(session, "log_decision", logged.append)
    group = SimpleNamespace(size=lambda: 4)

    def chosen(rows, heads, groups):
        q, k = torch.empty(rows, 1, heads, 8, device="meta"), torch.empty(rows, 1, groups, 8, device="meta")
        return context_groups.least_exposed(q, k, k, group, True, session)

    assert chosen(64, 8, 8) == chosen(64, 8, 8) == "ulysses"
    assert chosen(8, 32, 1) == "ring", "32 query heads' products hide the hops of one key head"
    assert chosen(1 << 16, 8, 8) == "ring", "products of long sequences hide what travels"
    assert chosen(1 << 10, 2, 2) == "ring", "fewer heads than ranks"
    assert len(logged) == 4 and "ulysses for 64 rows on each of 4 ranks" in logged[0]
