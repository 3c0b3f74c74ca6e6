"""Real links between network namespaces, one of them slow, as `mindspeed-lite links` sees them."""

from __future__ import annotations

import json
import sys

import pytest

from lab import namespaces
from tests.harness.matrix import whole

pytestmark = [whole, pytest.mark.skipif(not namespaces.available(), reason="needs root and tc")]


@pytest.mark.parametrize(
    ("hosts", "ranks", "slow", "kind", "names"),
    [
        (4, 1, (0, 1, 40.0), "link", ["host0", "host1"]),
        (4, 1, (2, None, 40.0), "host", ["host2"]),
        (3, 2, (0, 2, 40.0), "link", ["host0", "host2"]),
    ],
)
def test_what_is_throttled_is_named(tmp_path, hosts, ranks, slow, kind, names):
    file = tmp_path / "links.json"
    command = [sys.executable, "-m", "mindspeed_lite", "links", "--json", str(file)]
    assert namespaces.run(command, hosts, 400.0, [slow], ranks) == 0
    found = json.loads(file.read_text())
    parts = [each for each in found["slow"] if each["what"] == "bandwidth" and each["kind"] in ("host", "link")]
    assert [kind, names] in [[each["kind"], each["names"]] for each in parts], found["slow"]
    assert found["hosts"] == [f"host{rank // ranks}" for rank in range(hosts * ranks)]
