"""The environment with torch_npu, and what was recorded in it.

NPU_CONTRACT=1, which `make test-npu` sets: nothing skips, what cannot be prepared is an error. NPU_CONTRACT=auto, which
`make test` sets: what cannot be prepared is why the tests that need it are skipped. Without the variable, as in a plain
`python -m pytest`, they are skipped with a word on how to run them, and nothing is downloaded.
"""

from __future__ import annotations

import json
import os
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
def records(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By mode, what runner.py recorded of each call: in "fake" without memory, in "host" with the host's."""
    found = {}
    for mode in ("fake", "host"):
        out = tmp_path_factory.mktemp("npu_contract") / "records.json"
        ran = environment.run("tests.npu_contract.runner", mode, str(out), mode)
        assert ran.returncode == 0, f"the run in mode {mode} ended with {ran.returncode}:\n{ran.stderr[-4000:]}"
        found[mode] = from_json(json.loads(out.read_text()))
    return found
