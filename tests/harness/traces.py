"""Committed traces of Megatron's layers, with which tests predict memory without tracing."""

from __future__ import annotations

import json

from mindspeed_lite.planner import traces
from tests.harness.checkouts import ROOT

FILE = ROOT / "tests" / "planner" / "traces.json"


def load() -> None:
    traces.known.update(json.loads(FILE.read_text()))


def write() -> None:
    """Add what this run has asked for."""
    found = {**json.loads(FILE.read_text()), **traces.known}
    lines = [f"{json.dumps(each)}: {json.dumps(found[each], separators=(',', ':'))}" for each in sorted(found)]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
