"""Real links between network namespaces, one of them slow, as `mindspeed-lite links` sees them."""

from __future__ import annotations

import json
import random
import sys
import time

import pytest

from lab import namespaces
from tests.harness.matrix import whole

pytestmark = [whole, pytest.mark.skipif(not namespaces.available(), reason="needs root and tc")]


def drawn(seed: int) -> tuple[int, int, str, list[str], dict[str, list]]:
    """(hosts, ranks of each, kind, names, what is planted)"""
    chance = random.Random(seed)
    kind = ("link", "host", "straggler")[seed % 3]
    hosts, ranks = chance.choice([(4, 1), (5, 1), (3, 2)])
    if kind == "straggler":
        rank = chance.randrange(hosts * ranks)
        return hosts, ranks, kind, [f"rank {rank} (host{rank // ranks})"], {"stragglers": [rank]}
    places = sorted(chance.sample(range(hosts), 2 if kind == "link" else 1))
    slow = (places[0], places[1] if kind == "link" else None, 400.0 / chance.uniform(4, 10))
    return hosts, ranks, kind, [f"host{each}" for each in places], {"slow": [slow]}


@pytest.mark.parametrize("seed", range(20))
def test_what_is_planted_is_named(tmp_path, seed):
    """A slow link, a slow host, and a rank that is halted most of the time."""
    hosts, ranks, kind, names, planted = drawn(seed)
    file = tmp_path / "links.json"
    command = [sys.executable, "-m", "mindspeed_lite", "links", "--json", str(file)]
    assert namespaces.run(command, namespaces.Network(hosts, 400.0, ranks_per_host=ranks, **planted)) == 0
    found = json.loads(file.read_text())
    parts = [[each["kind"], each["names"]] for each in found["slow"] if each["what"] != "latency"]
    assert [kind, names] in parts, (found["slow"], found["compute"])
    assert found["hosts"] == [f"host{rank // ranks}" for rank in range(hosts * ranks)]


def test_a_rank_that_is_killed_ends_all_with_one_line(tmp_path, capfd):
    """In the middle of a measurement; the others say which error of the network told them."""
    code = (
        "import os, signal, sys\n"
        "from mindspeed_lite.parallel.link_probe import LinkProbe\n"
        "latency = LinkProbe._latency\n"
        "def killed(self, peer, sender):\n"
        "    if self.rank == 2 and sender == 2:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return latency(self, peer, sender)\n"
        "LinkProbe._latency = killed\n"
        "from mindspeed_lite.cli import main\n"
        "sys.exit(main(['links', '--json', sys.argv[1]]))\n"
    )
    file, began = tmp_path / "links.json", time.monotonic()
    assert namespaces.run([sys.executable, "-c", code, str(file)], namespaces.Network(3, 400.0)) != 0
    assert time.monotonic() - began < 60 and not file.exists()
    said = [line for line in capfd.readouterr().err.splitlines() if "arn" not in line and not line.startswith("[W")]
    assert "mindspeed-lite links: error: " in said[0] and not any("Traceback" in line for line in said), said
