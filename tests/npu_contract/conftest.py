"""The environment with torch_npu, and what was recorded in it.

These tests run in `make test-npu`, which sets NPU_CONTRACT=1. There nothing skips: what cannot be prepared is an
error. Elsewhere, as in a plain `python -m pytest`, what needs torch_npu is skipped with a word on how to run it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.npu_contract.environment import Environment, prepare
from tests.npu_contract.recorder import from_json


@pytest.fixture(scope="session")
def environment() -> Environment:
    """torch_npu and stub CANN libraries in .npu."""
    if os.environ.get("NPU_CONTRACT") != "1":
        pytest.skip("needs torch_npu in .npu: make test-npu")
    return prepare()


@pytest.fixture(scope="session")
def run(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """run(mode, *arguments): what runner.py wrote."""

    def run(mode: str, *arguments: str) -> Any:
        out = tmp_path_factory.mktemp("npu_contract") / "records.json"
        ran = environment.run("tests.npu_contract.runner", mode, str(out), *arguments)
        assert ran.returncode == 0, f"the run in mode {mode} ended with {ran.returncode}:\n{ran.stderr[-4000:]}"
        return from_json(json.loads(out.read_text()))

    return run


@pytest.fixture(scope="session")
def on_npu(run: Callable[..., Any]) -> dict[str, Any]:
    """{"cases" or "probes": {"fake" or "content": {name: record}}}, from one process without memory."""
    records: dict[str, Any] = run("fake", "records", "fake", "content")
    return records


@pytest.fixture(scope="session")
def on_host(run: Callable[..., Any]) -> dict[str, Any]:
    """The same with the one pass "host", from a process whose device has the host's memory."""
    records: dict[str, Any] = run("host", "records", "host")
    return records


@pytest.fixture(scope="session")
def mutated(run: Callable[..., Any]) -> dict[str, list[str]]:
    """The problems that each mutation caused."""
    problems: dict[str, list[str]] = run("fake", "mutations")
    return problems
