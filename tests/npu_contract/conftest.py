"""The environment with torch_npu, and what was recorded in it.

NPU_CONTRACT=1, which `make test-npu` sets: nothing skips, what cannot be prepared is an error. NPU_CONTRACT=auto, which
`make test` sets: what cannot be prepared is why the tests that need it are skipped. Without the variable, as in a plain
`python -m pytest`, they are skipped with a word on how to run them, and nothing is downloaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.npu_contract.environment import Environment, NotPreparedError, prepare
from tests.npu_contract.recorder import from_json


@pytest.fixture(scope="session")
def environment() -> Environment:
    """torch_npu and stub CANN libraries in .npu."""
    wanted = os.environ.get("NPU_CONTRACT")
    if wanted not in ("1", "auto"):
        pytest.skip("needs torch_npu in .npu: make test-npu")
    try:
        return prepare()
    except NotPreparedError as error:
        if wanted == "1":
            raise
        pytest.skip(f"the calls of torch_npu are not proven here: {error}")


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
    """{"cases" or "declared": {"fake" or "content": {name: record}}}, from one process without memory."""
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
